"""Side effects of a traced step: attribute and container writes that become results of the
graph, and changes on the host, which are refused."""
