"""The models: torchtitan's blocks, with true positions and sparse attention."""
