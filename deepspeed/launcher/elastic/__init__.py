"""Elastic jobs: torch's elastic agent and rendezvous, with this launcher's ranks, verdicts and words."""
