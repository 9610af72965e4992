"""Disks that this process has open, as Python objects (see disks.pyx)."""

from moonpool.native.disk.drive cimport mp_disk_path
from moonpool.native.disk.rings cimport DiskRings, mp_disk

cdef class Disk:
    cdef mp_disk raw
    cdef DiskRings rings
    cdef readonly bint closed

cdef class DiskPath:
    cdef mp_disk_path raw
    cdef DiskRings rings
