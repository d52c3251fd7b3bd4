"""Collectives between ranks: one protocol (`protocol`), several backends (`groups` chooses among them)."""
