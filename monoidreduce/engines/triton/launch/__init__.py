"""From kernel text to a launch: JIT modules, caches, tensor descriptors, recorded launches."""
