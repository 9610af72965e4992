"""NVMe namespaces: commands by io_uring passthrough, requests by the block device, what finds them again."""
