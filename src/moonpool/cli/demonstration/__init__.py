"""What `moonpool demo` runs: a target process, traffic with every byte checked, and a violent end."""
