# Importing this module is what makes io_uring selectable (see stream.have_ring): it has no names of its own.
