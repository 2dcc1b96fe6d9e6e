#!/bin/bash
# Run on every node, HEAD being the name of one of them: 1 to 4 nodes take part, and may come and go.
export TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1  # passed on to the ranks, which save
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a fresh store for each start: nothing of the last one is read
exec torchrun \
    --nnodes=1:4 \
    --nproc-per-node=8 \
    --max-restarts=10 \
    --rdzv-id=my_job \
    --rdzv-backend=c10d \
    --rdzv-endpoint="${HEAD:-localhost}:29400" \
    --rdzv-conf=last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3 \
    examples/elastic/train.py --folder /shared/ckpt
