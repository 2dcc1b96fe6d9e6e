"""What keeps ranks together: one order of collectives, and one rank's error as a matter of all."""
