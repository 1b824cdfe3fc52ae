"""Train. The `TRAIN_FILE` of `run_train.sh`:

torchrun --nproc_per_node=2 -m recipes.train --job.config_file X.toml
"""

import mtraining_flex  # noqa: F401  before torchtitan, which takes its device at import
from mtraining_flex import cpu_device, train_spec
from mtraining_flex.trainer import main

if __name__ == "__main__":
    train_spec.register()
    main()
    if cpu_device.available_device_type() == "cpu":
        cpu_device.leave()
