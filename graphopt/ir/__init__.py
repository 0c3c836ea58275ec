"""What every stage stands on: what operators do, and who reads, writes and aliases what."""
