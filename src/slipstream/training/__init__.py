"""Training a drafter: data, features, objectives, the loop, and recipes."""
