//! Puts the XDP program on an interface and takes it off again.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use super::assembler::{Assembler, Register};
use super::bpf::{self, Map, Program};
use super::btf;
use super::classify::{COUNTER_BYTES, Entry};
use super::matches::KernelMatch;
use super::program::{self, COUNTERS, Inputs};
use super::rules;
use super::socket::{Bound, Failed};
use crate::drivers::kernel::link::Xdp;
use crate::drivers::kernel::netlink::{Netlink, ifinfomsg, put};

const RTM_SETLINK: u16 = 19;
const IFLA_XDP: u16 = 43;
const IFLA_XDP_FD: u16 = 1;
const IFLA_XDP_FLAGS: u16 = 3;
/// `IFLA_XDP` is a nest of attributes.
const NLA_F_NESTED: u16 = 1 << 15;
/// `XDP_FLAGS_UPDATE_IF_NOEXIST`.
const ONLY_IF_NONE: u32 = 1;

const VLAN_TAG_FUNCTION: &str = "bpf_xdp_metadata_rx_vlan_tag";

/// What to attach.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'a> {
    pub(super) interface: u32,
    /// Native XDP, else generic.
    pub(super) native: bool,
    /// Take frames of several buffers.
    pub(super) fragments: bool,
    /// Ask the device for the VLAN tag that it keeps beside a frame.
    pub(super) vlan_tag: bool,
    /// Attach by link; without, by netlink.
    pub(super) link: bool,
    pub(super) kernel: &'a [KernelMatch],
    /// Rules that the program decides.
    pub(super) rules: &'a [Entry],
}

/// An attached program. Goes with this value; by link also with the process, however it ends.
#[derive(Debug)]
pub(super) struct Attached {
    hold: Hold,
    maps: Maps,
    /// The program restores VLAN tags.
    pub(super) vlan_tag: bool,
    function: Option<u32>,
}

#[derive(Debug)]
struct Maps {
    sockets: Map,
    counters: Map,
    rules: Map,
}

#[derive(Debug)]
enum Hold {
    Link { link: OwnedFd },
    Netlink { netlink: Netlink, interface: u32, mode: u32 },
}

fn failed(what: &str) -> impl FnOnce(io::Error) -> Failed + '_ {
    move |source| Failed { what: what.to_owned(), source }
}

/// Loads the program for these sockets and attaches it.
pub(super) fn attach(request: Request<'_>, sockets: &[Bound]) -> Result<Attached, Failed> {
    let map = Map::new(bpf::MAP_XSK, 4, sockets.len() as u32).map_err(failed("making the map of sockets"))?;
    for bound in sockets {
        map.set(bound.socket.queue, bound.socket.as_fd()).map_err(failed("putting a socket into its map"))?;
    }
    let counters = Map::new(bpf::MAP_ARRAY, 8, COUNTERS.len() as u32).map_err(failed("making the map of counters"))?;
    let rules = Map::new(bpf::MAP_ARRAY, COUNTER_BYTES, rules::COUNTERS).map_err(failed("making the map of rules"))?;
    let maps = Maps { sockets: map, counters, rules };
    let function = (request.vlan_tag && request.native).then(vlan_tag_function).flatten();
    let attempt = |function| {
        let program = load(&request, &maps, function)?;
        hold(&program, &request)
    };
    match function.map(|function| attempt(Some(function))) {
        Some(Ok(hold)) => Ok(Attached { hold, maps, vlan_tag: true, function }),
        _ => {
            let hold = attempt(None)?;
            Ok(Attached { hold, maps, vlan_tag: false, function: None })
        }
    }
}

fn load(request: &Request<'_>, maps: &Maps, vlan_tag: Option<u32>) -> Result<Program, Failed> {
    let inputs = Inputs {
        sockets: maps.sockets.number(),
        counters: maps.counters.number(),
        vlan_tag,
        kernel: request.kernel,
        rules: request.rules,
        rule_counters: maps.rules.number(),
        without_socket: program::XDP_PASS,
    };
    let code = program::assemble(&inputs).map_err(|what| Failed {
        what: format!("assembling the XDP program: {what}"),
        source: io::ErrorKind::InvalidData.into(),
    })?;
    let bound = if vlan_tag.is_some() { bpf::DEVICE_BOUND } else { 0 };
    let flags = bound | if request.fragments { bpf::HAS_FRAGS } else { 0 };
    Program::load(&code, program::NAME, flags, request.interface).map_err(|error| {
        let mut what = "loading the XDP program".to_owned();
        if !request.rules.is_empty() {
            what += " with rules (Linux 5.18)";
        }
        if !error.report.is_empty() {
            what += &format!(" (verifier: {})", error.report);
        }
        Failed { what, source: error.source }
    })
}

fn hold(program: &Program, request: &Request<'_>) -> Result<Hold, Failed> {
    let mode = if request.native { bpf::NATIVE } else { bpf::GENERIC };
    let what = if request.native { "attaching as native XDP" } else { "attaching as generic XDP" };
    if request.link {
        match program.link(request.interface, mode) {
            Ok(link) => return Ok(Hold::Link { link }),
            // A kernel without links for XDP (before 5.9) says EINVAL, as others do for much else: netlink will tell.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(source) => return Err(Failed { what: what.to_owned(), source }),
        }
    }
    let mut netlink = Netlink::route().map_err(failed(what))?;
    set_program(&mut netlink, request.interface, program.number(), mode | ONLY_IF_NONE).map_err(failed(what))?;
    Ok(Hold::Netlink { netlink, interface: request.interface, mode })
}

fn set_program(netlink: &mut Netlink, interface: u32, program: i32, flags: u32) -> io::Result<()> {
    let mut xdp = Vec::new();
    put(&mut xdp, IFLA_XDP_FD, &program.to_ne_bytes());
    put(&mut xdp, IFLA_XDP_FLAGS, &flags.to_ne_bytes());
    let mut body = ifinfomsg(interface, 0, 0);
    put(&mut body, IFLA_XDP | NLA_F_NESTED, &xdp);
    netlink.request(RTM_SETLINK, 0, &body, |_, _| {})
}

/// Id of the kernel's function that tells a frame's VLAN tag, if the kernel has it (Linux 6.8) and its types are readable.
pub(super) fn vlan_tag_function() -> Option<u32> {
    static ID: std::sync::OnceLock<Option<u32>> = std::sync::OnceLock::new();
    *ID.get_or_init(|| btf::function_id(&std::fs::read("/sys/kernel/btf/vmlinux").ok()?, VLAN_TAG_FUNCTION))
}

/// Name of a program that is on an interface, for messages.
pub(super) fn name_of(xdp: Xdp) -> String {
    bpf::program_name(xdp.program).unwrap_or_default()
}

/// Takes a program off that was attached by netlink, as a killed process on an old kernel leaves it. Programs that a link holds are
/// refused by the kernel (`EBUSY`).
pub(super) fn detach_leftover(interface: u32, xdp: Xdp) -> io::Result<()> {
    let mode = if xdp.attached == 2 { bpf::GENERIC } else { bpf::NATIVE };
    set_program(&mut Netlink::route()?, interface, -1, mode)
}

/// Takes any program off.
pub(super) fn detach_any(interface: u32, xdp: Xdp) -> io::Result<()> {
    match detach_leftover(interface, xdp) {
        Ok(()) => Ok(()),
        Err(error) => match bpf::detach_links(interface)? {
            true => Ok(()),
            false => Err(error),
        },
    }
}

impl Attached {
    /// Puts a program with other rules in the place of this one, between two frames.
    pub(super) fn replace(&mut self, request: &Request<'_>) -> Result<(), Failed> {
        let program = load(request, &self.maps, self.function)?;
        let what = "replacing the XDP program";
        match &mut self.hold {
            Hold::Link { link } => program.replace(link).map_err(failed(what)),
            Hold::Netlink { netlink, interface, mode } => {
                set_program(netlink, *interface, program.number(), *mode).map_err(failed(what))
            }
        }
    }

    /// Packets and bytes of a rule's counter.
    pub(super) fn rule_counter(&self, number: u32) -> Option<(u64, u64)> {
        self.maps.rules.get_pair(number).ok().map(|[packets, bytes]| (packets, bytes))
    }

    /// Sets a rule's counter to zero.
    pub(super) fn clear_rule_counter(&self, number: u32) -> Result<(), Failed> {
        self.maps.rules.set_pair(number, [0; 2]).map_err(failed("clearing the counter of a rule"))
    }

    /// What the program counted: names and values.
    pub(super) fn counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
        COUNTERS.iter().zip(0..).map(|(&name, key)| (name, self.maps.counters.get(key).unwrap_or(0)))
    }

    /// In words, if it is not the usual way.
    pub(super) fn note(&self) -> Option<&'static str> {
        match self.hold {
            Hold::Link { .. } => None,
            Hold::Netlink { .. } => Some(
                "the XDP program is attached by netlink: if the process is killed it stays on the interface until the next start \
                 or `ip link set dev DEVICE xdp off`",
            ),
        }
    }
}

/// A program that gives every frame to the kernel: what frames are injected by.
pub(super) fn injector(interface: u32) -> Result<Program, Failed> {
    let mut a = Assembler::default();
    a.set(Register::R0, program::XDP_PASS);
    a.exit();
    let code = a.finish().unwrap_or_default();
    Program::load(&code, "wirepath_inject", 0, interface)
        .map_err(|error| Failed { what: "loading the program for injected frames".to_owned(), source: error.source })
}

impl Drop for Attached {
    fn drop(&mut self) {
        if let Hold::Netlink { netlink, interface, mode } = &mut self.hold {
            let _ = set_program(netlink, *interface, -1, *mode);
        }
    }
}
