"""The plain designs that Outboard is compared with."""
