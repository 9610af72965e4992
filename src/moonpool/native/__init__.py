"""Modules in Cython: libraries and sockets wrapped in `io`, pure structures in `table`."""
