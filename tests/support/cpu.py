"""What the CPU of this machine lacks, on which some expectations depend."""

from lathe_serving.runtime.exported_model import x86_flags
from lathe_serving.runtime.session import CPUINFO, saturates

_CPUINFO = CPUINFO.read_text()

WITHOUT_VNNI = saturates(_CPUINFO)
"""OpenVINO's sums of static INT8 may saturate there, so that it is refused."""

WITHOUT_AVX512 = "avx512f" not in x86_flags(_CPUINFO)
