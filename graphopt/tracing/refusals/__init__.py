"""What a step may not do, found while it is traced: each refusal names the line and the cure.

`host_work` is the table of what is refused on the host. Calls, reads, writes and effects are found
by the files of these names. `failures` turns whatever else stops a trace into a `CaptureError`.
"""
