"""Sans-I/O codecs: the reference for every byte that crosses a wire."""
