"""Device memory: runtimes opened at run time, staging through pinned memory, copies between devices."""
