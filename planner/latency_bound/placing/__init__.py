"""Where layers lie under a schedule: devices, bits and partition, decided together with it."""
