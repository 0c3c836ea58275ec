"""Side effects of a step: what it writes outside its results, as results of the graph that each
call puts where the step put them; and what it leaves on the host."""
