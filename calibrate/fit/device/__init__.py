"""A device record fitted: what the device reaches, mechanism by mechanism, as a device file."""
