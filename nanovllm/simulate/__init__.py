"""A fleet of replicas without a device: the real scheduler and prefix cache, a modelled clock."""

POOLED = "one-big"  # no fleet but one replica with everything of all
POLICIES = ("prefix", "round-robin", "least-loaded", POOLED)
