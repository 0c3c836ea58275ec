"""Ranks: where they meet and agree, and what becomes of all when one fails."""
