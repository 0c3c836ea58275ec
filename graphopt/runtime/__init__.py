"""Running steps: today those that are not captured."""
