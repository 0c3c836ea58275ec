"""Snapshots of what guards look at: many places compared at once, before each call of a step."""
