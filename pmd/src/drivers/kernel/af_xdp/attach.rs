//! Attaches the XDP program to an interface and detaches it.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use super::btf;
use super::classify::{COUNTER_BYTES, ProgramRule};
use super::kernel_match::KernelMatch;
use super::program::{self, COUNTERS, Inputs};
use super::rules;
use super::socket::{BoundSocket, SetupError};
use crate::drivers::kernel::common::assembler::{Assembler, Register};
use crate::drivers::kernel::common::bifurcation::{LaterFragments, new_fragment_map};
use crate::drivers::kernel::common::bpf::{self, Map, Program, ProgramKind, ProgramLink};
use crate::drivers::kernel::common::link::Xdp;
use crate::drivers::kernel::common::netlink::{Netlink, ifinfomsg, put};
use crate::port::Bifurcation;

const RTM_SETLINK: u16 = 19;
const IFLA_XDP: u16 = 43;
const IFLA_XDP_FD: u16 = 1;
const IFLA_XDP_FLAGS: u16 = 3;
/// Flag of nested attributes such as `IFLA_XDP`.
const NLA_F_NESTED: u16 = 1 << 15;
/// `XDP_FLAGS_UPDATE_IF_NOEXIST`.
const ONLY_IF_NONE: u32 = 1;

const VLAN_TAG_FUNCTION: &str = "bpf_xdp_metadata_rx_vlan_tag";

/// Parameters of the program and of its attachment.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttachRequest<'a> {
    pub(super) interface: u32,
    /// True for native XDP, false for generic.
    pub(super) native: bool,
    /// Accept frames of several buffers.
    pub(super) fragments: bool,
    /// Read the VLAN tag that the NIC stripped from a frame.
    pub(super) vlan_tag: bool,
    /// Attach by a BPF link; otherwise by netlink.
    pub(super) link: bool,
    pub(super) kernel: &'a [KernelMatch],
    /// Frames that the port takes; `None`: all that are not passed to the kernel.
    pub(super) bifurcation: Option<&'a Bifurcation>,
    /// Rules inside the program.
    pub(super) rules: &'a [ProgramRule],
}

/// An attached program. It is detached when this value is dropped; a BPF link also detaches it when the
/// process ends.
#[derive(Debug)]
pub(super) struct AttachedProgram {
    attachment: Attachment,
    maps: Maps,
    /// True if the program restores VLAN tags.
    pub(super) vlan_tag: bool,
    function: Option<u32>,
}

#[derive(Debug)]
struct Maps {
    sockets: Map,
    counters: CounterMaps,
}

/// Maps of the program's counters. A program on the returned interface continues to count in them.
#[derive(Clone, Debug)]
pub(super) struct CounterMaps {
    program: Arc<Map>,
    rules: Arc<Map>,
}

#[derive(Debug)]
enum Attachment {
    Link { link: ProgramLink },
    Netlink { netlink: Netlink, interface: u32, mode: u32 },
}

fn failed(what: &str) -> impl FnOnce(io::Error) -> SetupError + '_ {
    move |source| SetupError { what: what.to_owned(), source }
}

impl CounterMaps {
    fn new() -> Result<Self, SetupError> {
        let program =
            Map::new(bpf::MAP_ARRAY, 8, COUNTERS.len() as u32).map_err(failed("creating the map of counters"))?;
        let rules = Map::new(bpf::MAP_ARRAY, COUNTER_BYTES, rules::COUNTERS)
            .map_err(failed("creating the map of rule counters"))?;
        Ok(Self { program: Arc::new(program), rules: Arc::new(rules) })
    }

    /// Returns packets and bytes of a rule's counter.
    pub(super) fn rule_counter(&self, number: u32) -> Option<(u64, u64)> {
        self.rules.get_pair(number).ok().map(|[packets, bytes]| (packets, bytes))
    }

    /// Resets the counter of a rule to zero.
    pub(super) fn clear_rule_counter(&self, number: u32) -> Result<(), SetupError> {
        self.rules.set_pair(number, [0; 2]).map_err(failed("clearing the counter of a rule"))
    }

    /// Returns the program's counters: names and values.
    pub(super) fn counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
        COUNTERS.iter().zip(0..).map(|(&name, key)| (name, self.program.get(key).unwrap_or(0)))
    }
}

/// Loads the program for these sockets and attaches it.
pub(super) fn attach(
    request: AttachRequest<'_>,
    sockets: &[BoundSocket],
    counters: Option<CounterMaps>,
) -> Result<AttachedProgram, SetupError> {
    let map = Map::new(bpf::MAP_XSK, 4, sockets.len() as u32).map_err(failed("creating the map of sockets"))?;
    for bound in sockets {
        map.set(bound.socket.queue, bound.socket.as_fd()).map_err(failed("storing a socket in its map"))?;
    }
    let counters = counters.map_or_else(CounterMaps::new, Ok)?;
    let maps = Maps { sockets: map, counters };
    let function = (request.vlan_tag && request.native).then(vlan_tag_function).flatten();
    let attempt = |function| {
        let program = load(&request, &maps, function)?;
        attach_to_interface(&program, &request)
    };
    match function.map(|function| attempt(Some(function))) {
        Some(Ok(attachment)) => Ok(AttachedProgram { attachment, maps, vlan_tag: true, function }),
        _ => {
            let attachment = attempt(None)?;
            Ok(AttachedProgram { attachment, maps, vlan_tag: false, function: None })
        }
    }
}

fn load(request: &AttachRequest<'_>, maps: &Maps, vlan_tag: Option<u32>) -> Result<Program, SetupError> {
    // The program keeps the map.
    let fragments = request.bifurcation.map_or(Ok(None), new_fragment_map);
    let fragments = fragments.map_err(failed("creating the map of fragments"))?;
    let inputs = Inputs {
        sockets: maps.sockets.raw_fd(),
        counters: maps.counters.program.raw_fd(),
        vlan_tag,
        kernel: request.kernel,
        bifurcation: request.bifurcation,
        later_fragments: LaterFragments::known(fragments.as_ref()),
        rules: request.rules,
        rule_counters: maps.counters.rules.raw_fd(),
        no_socket_action: program::XDP_PASS,
    };
    let code = program::assemble(&inputs).map_err(|what| SetupError {
        what: format!("assembling the XDP program: {what}"),
        source: io::ErrorKind::InvalidData.into(),
    })?;
    let bound = if vlan_tag.is_some() { bpf::DEVICE_BOUND } else { 0 };
    let flags = bound | if request.fragments { bpf::HAS_FRAGS } else { 0 };
    Program::load(ProgramKind::Xdp, &code, program::NAME, flags, request.interface).map_err(|error| {
        let mut what = "loading the XDP program".to_owned();
        if !request.rules.is_empty() || request.bifurcation.is_some() {
            what += " with rules (Linux 5.18)";
        }
        if !error.report.is_empty() {
            what += &format!(" (verifier: {})", error.report);
        }
        SetupError { what, source: error.source }
    })
}

fn attach_to_interface(program: &Program, request: &AttachRequest<'_>) -> Result<Attachment, SetupError> {
    let mode = if request.native { bpf::NATIVE } else { bpf::GENERIC };
    let what = if request.native { "attaching as native XDP" } else { "attaching as generic XDP" };
    if request.link {
        match program.link(request.interface, mode) {
            Ok(link) => return Ok(Attachment::Link { link }),
            // Kernels without XDP links (before 5.9) return EINVAL, which has other causes too. Attaching by
            // netlink shows which it is.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(source) => return Err(SetupError { what: what.to_owned(), source }),
        }
    }
    let mut netlink = Netlink::route().map_err(failed(what))?;
    set_program(&mut netlink, request.interface, program.raw_fd(), mode | ONLY_IF_NONE).map_err(failed(what))?;
    Ok(Attachment::Netlink { netlink, interface: request.interface, mode })
}

fn set_program(netlink: &mut Netlink, interface: u32, program: i32, flags: u32) -> io::Result<()> {
    let mut xdp = Vec::new();
    put(&mut xdp, IFLA_XDP_FD, &program.to_ne_bytes());
    put(&mut xdp, IFLA_XDP_FLAGS, &flags.to_ne_bytes());
    let mut body = ifinfomsg(interface, 0, 0);
    put(&mut body, IFLA_XDP | NLA_F_NESTED, &xdp);
    netlink.request(RTM_SETLINK, 0, &body, |_, _| {})
}

/// Returns the BTF id of the kernel function that reads a stripped VLAN tag. It needs Linux 6.8 and readable
/// BTF.
pub(super) fn vlan_tag_function() -> Option<u32> {
    static ID: std::sync::OnceLock<Option<u32>> = std::sync::OnceLock::new();
    *ID.get_or_init(|| btf::function_id(&std::fs::read("/sys/kernel/btf/vmlinux").ok()?, VLAN_TAG_FUNCTION))
}

/// Returns the name of an attached program, for messages.
pub(super) fn program_name_of(xdp: Xdp) -> String {
    bpf::program_name(xdp.program).unwrap_or_default()
}

/// Detaches a program that was attached by netlink. A process that is killed on an old kernel leaves one. The
/// kernel refuses this for programs that a link holds (`EBUSY`).
pub(super) fn detach_leftover(interface: u32, xdp: Xdp) -> io::Result<()> {
    let mode = if xdp.attached == 2 { bpf::GENERIC } else { bpf::NATIVE };
    set_program(&mut Netlink::route()?, interface, -1, mode)
}

/// Detaches any program.
pub(super) fn detach_any(interface: u32, xdp: Xdp) -> io::Result<()> {
    match detach_leftover(interface, xdp) {
        Ok(()) => Ok(()),
        Err(error) => match bpf::detach_links(interface, xdp.program)? {
            true => Ok(()),
            false => Err(error),
        },
    }
}

impl AttachedProgram {
    /// Replaces the program by one with other rules, atomically between two frames.
    pub(super) fn replace(&mut self, request: &AttachRequest<'_>) -> Result<(), SetupError> {
        let program = load(request, &self.maps, self.function)?;
        let what = "replacing the XDP program";
        match &mut self.attachment {
            Attachment::Link { link } => program.replace(link).map_err(failed(what)),
            Attachment::Netlink { netlink, interface, mode } => {
                set_program(netlink, *interface, program.raw_fd(), *mode).map_err(failed(what))
            }
        }
    }

    /// Returns packets and bytes of a rule's counter.
    pub(super) fn rule_counter(&self, number: u32) -> Option<(u64, u64)> {
        self.maps.counters.rule_counter(number)
    }

    /// Resets the counter of a rule to zero.
    pub(super) fn clear_rule_counter(&self, number: u32) -> Result<(), SetupError> {
        self.maps.counters.clear_rule_counter(number)
    }

    /// Returns the maps of the counters.
    pub(super) fn counter_maps(&self) -> CounterMaps {
        self.maps.counters.clone()
    }

    /// Returns a note for the user if the program is not attached by a link.
    pub(super) fn note(&self) -> Option<&'static str> {
        match self.attachment {
            Attachment::Link { .. } => None,
            Attachment::Netlink { .. } => Some(
                "the XDP program is attached by netlink: if the process is killed it stays on the interface until \
                 the next start or `ip link set dev DEVICE xdp off`",
            ),
        }
    }
}

/// Loads a program that passes every frame to the kernel. It serves to inject frames.
pub(super) fn load_injector(interface: u32) -> Result<Program, SetupError> {
    let mut a = Assembler::default();
    a.set(Register::R0, program::XDP_PASS);
    a.exit();
    let code = a.finish().unwrap_or_default();
    Program::load(ProgramKind::Xdp, &code, "wirepath_inject", 0, interface).map_err(|error| SetupError {
        what: "loading the program for injected frames".to_owned(),
        source: error.source,
    })
}

impl Drop for AttachedProgram {
    fn drop(&mut self) {
        if let Attachment::Netlink { netlink, interface, mode } = &mut self.attachment {
            let _ = set_program(netlink, *interface, -1, *mode);
        }
    }
}
