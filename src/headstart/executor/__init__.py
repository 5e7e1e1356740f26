"""How a step is computed: `base` is the protocol (no torch), `local` runs a worker in a thread of this process."""
