"""Train. The `TRAIN_FILE` of `run_train.sh`:

torchrun --nproc_per_node=2 -m recipes.train --job.config_file X.toml
"""

from torch.distributed.elastic.multiprocessing.errors import record

import mtraining_flex  # noqa: F401  before torchtitan, which takes its device at import
from mtraining_flex import cpu_device, train_spec
from mtraining_flex.trainer import main
from recipes.launch import die_with_agent

if __name__ == "__main__":
    die_with_agent()
    train_spec.register()
    record(main)()
    if cpu_device.available_device_type() == "cpu":
        cpu_device.leave()
