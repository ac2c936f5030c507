"""reproduce: the papers' tables and figures, measured here."""
