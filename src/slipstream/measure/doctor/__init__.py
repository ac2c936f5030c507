"""doctor: checks of a head, a target and a machine."""
