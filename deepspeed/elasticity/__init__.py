"""Training on a changing number of ranks; ``deepspeed.elasticity`` is the import path that clients use."""

from deepspeed.client.elastic import take_part
from deepspeed.config.model.elastic import compute_elastic_config, elasticity_enabled
from deepspeed.errors import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize, PreemptedExit
