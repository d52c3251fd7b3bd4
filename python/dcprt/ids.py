"""Index spaces as types, so that a position cannot be passed where a slot is meant."""

from __future__ import annotations

from typing import NewType

Position = NewType("Position", int)
"""Index of a token in its request, from 0."""

PageId = NewType("PageId", int)
"""A page, taken on every rank at once. Page 0 is never given out."""

Slot = NewType("Slot", int)
"""A physical place for one token's KV on one rank: `page * page_size + page_slot`."""

Span = NewType("Span", int)
"""Index into a request's page table."""

Row = NewType("Row", int)
"""A running request's place in the workers."""

Rank = NewType("Rank", int)
"""A worker process, 0 .. tp-1."""

NULL_PAGE = PageId(0)
"""Padding writes land here."""
