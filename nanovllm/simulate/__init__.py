"""Simulates a fleet of replicas without a device: real scheduler and prefix cache, computed step times."""

POOLED = "one-big"  # a single replica with the devices and the cache of all
POLICIES = ("prefix", "round-robin", "least-loaded", POOLED)
