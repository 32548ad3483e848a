"""How the ranks of a group meet in memory: hosts, rendezvous, barriers, counterparts on others."""
