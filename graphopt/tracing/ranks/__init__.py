"""Tracing for several ranks: functional collectives, uniform values, sharded inputs."""
