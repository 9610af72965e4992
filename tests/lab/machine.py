"""The emulated machine of the lab: its devices as a value, and the QEMU command line that makes them.

QEMU's software emulation boots an uncompressed PVH kernel; the guest's root is the host's own `/` over
virtio-9p. `init` in the initramfs reads `guest_settings` and makes the devices that only a kernel can make.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: Above this, memory of a machine with far memory lies past 4 GiB: firmware keeps tables at the top of low
#: RAM, and dax wants whole 2 MiB pages.
LOW_MEMORY_MB_MAX = 2048
#: What a neighbouring NUMA node and a CPU-less far node cost, in ACPI SLIT units (10 is local).
NEAR_DISTANCE, FAR_DISTANCE = 20, 40
#: Boot fast under emulation: skip calibration, self tests, auditing and probing for absent hardware.
KERNEL_ARGUMENTS = (
    "console=ttyS0 panic=-1 nokaslr mitigations=off tsc=reliable no_timer_check audit=0 lsm=",
    "cryptomgr.notests random.trust_cpu=1 8250.nr_uarts=1 i8042.noaux i8042.nokbd nowatchdog",
    "numa_balancing=disable edd=off lpj=5000000 rcupdate.rcu_expedited=1 raid=noautodetect",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the guest has. Sizes in MiB; 0 or "none" leaves a device out."""

    cpus: int = 2
    memory_mb: int = 2048
    numa_nodes: int = 1
    links: int = 0
    rdma: int = 0
    nvmf: str = "none"
    nvmf_mb: int = 128
    nvmf_options: str = ""
    nvme_mb: int = 0
    cxl_mb: int = 0
    cxl_mode: str = "dax"
    huge_pages: int = 0
    accelerator: str = "tcg"
    verbose: bool = False
    kernel_arguments: tuple[str, ...] = ()

    @property
    def emulates_cxl(self) -> bool:
        """True for a real CXL type-3 device; otherwise far memory is RAM of a far NUMA node."""
        return self.cxl_mb > 0 and self.cxl_mode.startswith("type3")

    @property
    def has_far_node(self) -> bool:
        return self.cxl_mb > 0 and not self.emulates_cxl


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """How the guest meets the host: the folder of this run, shared folders, and open pipes for its output."""

    cache: Path
    run_folder: Path
    shared: tuple[Path, ...]
    stdout_fd: int
    stderr_fd: int


def guest_settings(machine: Machine, wiring: Wiring, kernel: str) -> dict[str, str]:
    """The variables that `init` reads. `kernel` is the version whose modules are mounted."""
    far_device = {"dax": "dax", "node": "", "type3": "type3", "type3-node": "type3"}
    return {
        "KMOD": str(wiring.cache / "kernel/lib/modules" / kernel),
        "RW": "\n".join(str(path) for path in wiring.shared),
        "LINKS": str(machine.links),
        "RDMA": str(machine.rdma),
        "NVMF": machine.nvmf,
        "NVMF_MB": str(machine.nvmf_mb),
        "NVMF_OPTS": machine.nvmf_options,
        "NVME": str(machine.nvme_mb or ""),
        "HUGE": str(machine.huge_pages or ""),
        "CXL_MB": str(machine.cxl_mb),
        "CXL": far_device[machine.cxl_mode] if machine.cxl_mb else "",
        "CXL_NODE": "1" if machine.cxl_mb and machine.cxl_mode == "type3-node" else "",
    }


def qemu_command(machine: Machine, wiring: Wiring) -> list[str]:
    """The command line; `wiring`'s two descriptors must be inheritable by the process it starts."""
    board, memory_mb, arguments, far = _memory_layout(machine)
    tcg = machine.accelerator == "tcg"
    cpu = "max,la57=off" if tcg else "host"
    if machine.emulates_cxl:
        cpu += ",hypervisor=off"  # or Linux refuses to commit CXL regions
    size = f"{memory_mb}M,slots=4,maxmem={memory_mb + 4096}M" if machine.cxl_mb else f"{memory_mb}M"
    command = ["qemu-system-x86_64", "-accel", "tcg,thread=multi,tb-size=512" if tcg else machine.accelerator]
    command += ["-cpu", cpu, "-M", board, "-m", size, "-smp", str(machine.cpus)]
    command += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-rtc", "base=utc"]
    command += ["-device", "isa-debug-exit,iobase=0x501,iosize=1"]
    command += ["-kernel", f"{wiring.cache}/kernel/vmlinux", "-initrd", f"{wiring.cache}/initrd"]
    command += ["-serial", f"file:{wiring.run_folder}/console", "-device", "virtio-rng-pci"]
    command += _streams(wiring) + _shares(wiring) + _nvme_drive(machine, wiring) + far
    kernel_arguments = [*KERNEL_ARGUMENTS, f"loglevel={7 if machine.verbose else 5}", *arguments]
    return [*command, "-append", " ".join([*kernel_arguments, *machine.kernel_arguments])]


def _memory_layout(machine: Machine) -> tuple[str, int, list[str], list[str]]:
    """The board, all its memory in MiB, kernel arguments, and the devices of NUMA nodes and far memory."""
    board = "q35,usb=off,vmport=off,graphics=off"
    if machine.emulates_cxl:
        window_mb = max(256, machine.cxl_mb)
        board += f",cxl=on,cxl-fmw.0.targets.0=cxl.1,cxl-fmw.0.size={window_mb}M"
    devices: list[str] = []
    nodes = 0
    if machine.numa_nodes > 1 or machine.has_far_node:
        nodes = machine.numa_nodes
        for node in range(nodes):
            cpus = range(node, machine.cpus, nodes)
            devices += _numa_node(node, machine.memory_mb // nodes, "".join(f",cpus={cpu}" for cpu in cpus))
    if machine.emulates_cxl:
        devices += ["-object", f"memory-backend-ram,id=cx,size={machine.cxl_mb}M,share=on"]
        devices += ["-device", "pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl.1"]
        devices += ["-device", "cxl-rp,port=0,bus=cxl.1,id=rp0,chassis=0,slot=2"]
        devices += ["-device", "cxl-type3,bus=rp0,volatile-memdev=cx,id=mem0,sn=0xc0ffee"]
    if not machine.has_far_node:
        return board, machine.memory_mb, [], devices + _distances(nodes, far=-1)
    devices += _numa_node(nodes, machine.cxl_mb, "")
    low_mb = min(machine.memory_mb, LOW_MEMORY_MB_MAX)
    board += f",max-ram-below-4g={low_mb}M"
    arguments = []
    if machine.cxl_mode == "dax":  # its RAM becomes "soft reserved": dax_hmem makes /dev/dax0.0 of it
        start = (4096 + machine.memory_mb - low_mb) << 20
        arguments.append(f"memmap={machine.cxl_mb}M%{start:#x}-1+0xefffffff")
    total_mb = machine.memory_mb + machine.cxl_mb
    return board, total_mb, arguments, devices + _distances(nodes + 1, far=nodes)


def _numa_node(node: int, size_mb: int, cpus: str) -> list[str]:
    backend = f"memory-backend-ram,id=m{node},size={size_mb}M"
    return ["-object", backend, "-numa", f"node,nodeid={node},memdev=m{node}{cpus}"]


def _distances(nodes: int, far: int) -> list[str]:
    """NUMA distances between `nodes` nodes; `far` is the index of the CPU-less one, or -1."""
    arguments: list[str] = []
    for source in range(nodes):
        for target in range(nodes):
            if source != target:
                distance = FAR_DISTANCE if far in (source, target) else NEAR_DISTANCE
                arguments += ["-numa", f"dist,src={source},dst={target},val={distance}"]
    return arguments


def _streams(wiring: Wiring) -> list[str]:
    arguments = ["-device", "virtio-serial"]
    for name, fd in (("out", wiring.stdout_fd), ("err", wiring.stderr_fd)):
        arguments += ["-add-fd", f"fd={fd},set={fd}"]
        arguments += ["-chardev", f"file,id={name},path=/dev/fdset/{fd},append=on"]
        arguments += ["-device", f"virtserialport,chardev={name},name=lab.{name}"]
    return arguments


def _shares(wiring: Wiring) -> list[str]:
    shares = [("labroot", Path("/"), ",readonly=on"), ("labrun", wiring.run_folder, "")]
    shares += [(f"labrw{index}", folder, "") for index, folder in enumerate(wiring.shared)]
    arguments: list[str] = []
    for tag, folder, extra in shares:
        share = f"local,id={tag},path={folder},security_model=passthrough,multidevs=remap{extra}"
        arguments += ["-fsdev", share, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    return arguments


def _nvme_drive(machine: Machine, wiring: Wiring) -> list[str]:
    if not machine.nvme_mb:
        return []
    image = wiring.run_folder / "nvme.img"
    with image.open("wb") as sparse:
        sparse.truncate(machine.nvme_mb << 20)
    drive = f"file={image},format=raw,if=none,id=nv,cache=unsafe,discard=unmap"
    return ["-drive", drive, "-device", "nvme,serial=lab,drive=nv"]
