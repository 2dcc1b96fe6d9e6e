"""Why a job stands still: what every rank last did and where it is, compared without a collective."""
