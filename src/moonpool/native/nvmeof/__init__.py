"""NVMe namespaces: commands by io_uring passthrough, requests by the block device, and what finds them again."""
