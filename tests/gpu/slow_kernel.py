"""A kernel that takes its time and then writes: what a race needs. PTX the driver compiles."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_uint, c_uint32, c_uint64, c_void_p

from kvferry.transfer.driver import Driver

PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry slow_fill(.param .u64 dst, .param .u64 words, .param .u32 value, .param .u64 nanos)
{
  .reg .pred %p<3>;
  .reg .b32 %r<4>;
  .reg .b64 %rd<11>;
  ld.param.u64 %rd1, [dst];
  cvta.to.global.u64 %rd1, %rd1;
  ld.param.u64 %rd2, [words];
  ld.param.u32 %r1, [value];
  ld.param.u64 %rd3, [nanos];
  mov.u64 %rd4, %globaltimer;
  add.u64 %rd5, %rd4, %rd3;
SPIN:
  mov.u64 %rd6, %globaltimer;
  setp.lt.u64 %p1, %rd6, %rd5;
  @%p1 bra SPIN;
  mov.u32 %r2, %tid.x;
  cvt.u64.u32 %rd7, %r2;
  mov.u32 %r3, %ntid.x;
  cvt.u64.u32 %rd8, %r3;
FILL:
  setp.ge.u64 %p2, %rd7, %rd2;
  @%p2 bra DONE;
  shl.b64 %rd9, %rd7, 2;
  add.u64 %rd10, %rd1, %rd9;
  st.global.u32 [%rd10], %r1;
  add.u64 %rd7, %rd7, %rd8;
  bra FILL;
DONE:
  ret;
}
"""


class SlowFill:
    """Owns the loaded module."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._launch = driver.bind(
            "cuLaunchKernel", c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p
        )
        load = driver.bind("cuModuleLoadData", c_void_p, c_char_p)
        find = driver.bind("cuModuleGetFunction", c_void_p, c_void_p, c_char_p)
        self._module, self._function = c_void_p(), c_void_p()
        driver.check(load(byref(self._module), PTX), "cuModuleLoadData()")
        driver.check(find(byref(self._function), self._module, b"slow_fill"), "slow_fill")

    def queue(self, address: int, num_bytes: int, value: int, stream: int, *, ms: float) -> None:
        """After ``ms`` milliseconds, write ``value`` to every byte at ``address``."""
        arguments = (
            c_uint64(address),
            c_uint64(num_bytes // 4),
            c_uint32(value * 0x01010101),
            c_uint64(int(ms * 1e6)),
        )
        pointers = (c_void_p * 4)(*(ctypes.addressof(a) for a in arguments))
        code = self._launch(self._function, 1, 1, 1, 1024, 1, 1, 0, stream, pointers, None)
        self._driver.check(code, "cuLaunchKernel(slow_fill)")

    def close(self) -> None:
        self._driver.bind("cuModuleUnload", c_void_p)(self._module)
