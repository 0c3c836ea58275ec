"""What a graph looks like, row by row, apart from the graph: what a file keeps to be shown at once.

Nothing here needs torch, whose import takes longer than all else that `graphopt show` does.
`graphopt.listing.terminal` prints in colour. It is not imported here: the library it uses draws
from Python's random generator when it is imported, which a training program would notice.
"""

from graphopt.listing.files import FORMAT, VERSION, packed, read_listing
from graphopt.listing.rows import LATE, LAUNCH, MARKS, UPDATE, WAIT, Listing, ListingRow, Section
from graphopt.listing.text import heading, line, listing_text, readable_bytes
