"""Files and devices by io_uring: rings that batches share, the loop that drives them, plain files on top."""
