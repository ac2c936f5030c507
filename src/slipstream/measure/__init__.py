"""Question sets, runs beside both baselines, audits, and what is printed of them."""
