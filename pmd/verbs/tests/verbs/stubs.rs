//! Tests with stubs of libibverbs, libmana and libhbl, compiled from `stubs/` with the installed headers.
//!
//! They cover drop orders, failures, events and invalid answers, which a real library does not produce on demand.
//! Other tests use the real libraries.

// UNSAFETY: calls the control functions of the stubs.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use wirepath_memory::{BufferAllocator, Doorbell, Region, RegionBuilder};
use wirepath_testlab::{Requirement, require, skip_or_fail};
use wirepath_verbs::mana::{Mana, map_doorbells};
use wirepath_verbs::*;

use super::common::{ManaPort, drop_in_every_order, in_own_process, is_own_process, key, only_device, open};

/// Returns false and skips the test if the headers are not installed.
fn headers() -> bool {
    let there = Path::new("/usr/include/infiniband/manadv.h").exists();
    if !there {
        skip_or_fail(
            file!(),
            line!(),
            "needs the headers of rdma-core (Debian: libibverbs-dev); scripts/test installs them as root",
        );
    }
    there
}

fn compile(directory: &Path) {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/verbs/stubs");
    let libraries = [
        ("ibverbs.c", "libibverbs.so.1.14.44.0", "libibverbs.so.1"),
        ("mana.c", "libmana.so.1.0.44.0", "libmana.so.1"),
        ("hbl.c", "libhbl.so.1.0.44.0", "libhbl.so.1"),
    ];
    for (source, file, library) in libraries {
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-shared", "-fPIC", "-g", "-o"]).arg(directory.join(file)).arg(sources.join(source));
        cc.arg(format!("-Wl,-soname,{library}"));
        if library != "libibverbs.so.1" {
            cc.arg(directory.join("libibverbs.so.1.14.44.0"));
        }
        let output = cc.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::os::unix::fs::symlink(file, directory.join(library)).unwrap();
    }
}

/// Compiles the stubs and runs the test `name` with them in a process of its own. Returns `true` in that process.
fn on_stubs(name: &str, variables: &[(&str, PathBuf)]) -> bool {
    if is_own_process(name) {
        return true;
    }
    let directory = tempfile::tempdir().unwrap();
    compile(directory.path());
    let library_directory = (LIBRARY_DIRECTORY_VARIABLE, directory.path().to_owned());
    in_own_process(name, &[variables, &[library_directory]].concat())
}

macro_rules! on_stubs {
    ($name:literal $(, $variable:expr)*) => {
        require!(Requirement::Program("cc"));
        if !headers() || !on_stubs($name, &[$($variable),*]) {
            return;
        }
    };
}

/// Control functions of the stubs.
struct Control {
    ibverbs: libloading::Library,
    mana: libloading::Library,
    hbl: libloading::Library,
}

const KINDS: [&str; 12] =
    ["list", "context", "domain", "parent domain", "mr", "channel", "cq", "qp", "wq", "table", "rss qp", "encap"];

impl Control {
    fn new() -> Self {
        let directory = PathBuf::from(std::env::var_os(LIBRARY_DIRECTORY_VARIABLE).unwrap());
        // SAFETY: the stub libraries are loaded already, so this runs no initialisation code.
        let open = |name: &str| unsafe { libloading::Library::new(directory.join(name)).unwrap() };
        Self { ibverbs: open("libibverbs.so.1"), mana: open("libmana.so.1"), hbl: open("libhbl.so.1") }
    }

    fn fail(&self, call: &str, errno: i32) {
        let call = CString::new(call).unwrap();
        // SAFETY: the type is that of the function in ibverbs.c, which copies the name.
        unsafe {
            let fail = self.ibverbs.get::<unsafe extern "C" fn(*const c_char, c_int)>(b"stub_fail").unwrap();
            fail(call.as_ptr(), errno);
        }
    }

    fn raise(&self, event: u32, port: i32) {
        // SAFETY: the type is that of the function in ibverbs.c.
        unsafe { self.ibverbs.get::<unsafe extern "C" fn(u32, c_int)>(b"stub_raise").unwrap()(event, port) };
    }

    fn complete(&self) {
        // SAFETY: the type is that of the function in ibverbs.c.
        unsafe { self.ibverbs.get::<unsafe extern "C" fn()>(b"stub_complete").unwrap()() };
    }

    fn corrupt_answers(&self, how: i32) {
        // SAFETY: the type is that of the function in mana.c.
        unsafe { self.mana.get::<unsafe extern "C" fn(c_int)>(b"stub_corrupt_answers").unwrap()(how) };
    }

    /// Returns the number of living objects of each kind.
    fn live(&self) -> Vec<(&'static str, i32)> {
        // SAFETY: the type is that of the function in ibverbs.c.
        let count = |kind: usize| unsafe {
            self.ibverbs.get::<unsafe extern "C" fn(c_int) -> c_int>(b"stub_live").unwrap()(kind as c_int)
        };
        (0..KINDS.len()).map(|kind| (KINDS[kind], count(kind))).filter(|(_, count)| *count != 0).collect()
    }

    /// Asserts that no object is alive and that the stubs detected no violation.
    fn assert_clean(&self) {
        // SAFETY: the type is that of the function in ibverbs.c, and the returned text is static.
        let violations = unsafe {
            CStr::from_ptr(self.ibverbs.get::<unsafe extern "C" fn() -> *const c_char>(b"stub_violations").unwrap()())
        };
        assert_eq!(violations.to_str().unwrap(), "");
        assert_eq!(self.live(), []);
    }
}

/// Creates a port with send requests of 30 segments.
fn port() -> ManaPort {
    ManaPort::create(open(), BufferAllocator::builder().huge_pages(false).build(), 30).unwrap()
}

#[test]
fn device_attributes_are_read() {
    let sysfs = tempfile::tempdir().unwrap();
    let interface = sysfs.path().join("device/net/eth1");
    std::fs::create_dir_all(&interface).unwrap();
    std::fs::write(interface.join("dev_port"), "0\n").unwrap();
    std::fs::write(interface.join("address"), "00:15:5d:01:02:03\n").unwrap();
    std::fs::write(interface.join("mtu"), "1500\n").unwrap();
    on_stubs!("stubs::device_attributes_are_read", ("STUB_SYSFS", sysfs.path().to_owned()));
    let context = open();
    let control = Control::new();
    let device = context.device();
    assert_eq!((device.name().as_str(), device.device_file().as_str()), ("mana_0", "/dev/infiniband/uverbs0"));
    let (name, mac) = ("eth1".to_owned(), [0, 0x15, 0x5d, 1, 2, 3]);
    assert_eq!(device.interfaces(), [Interface { name, port: 1, mac, mtu: Some(1500) }]);
    assert_eq!(context.provider(), Provider::Mana);
    assert_eq!(context.completion_vectors(), 4);
    let attributes = context.attributes().unwrap();
    assert_eq!((attributes.firmware.as_str(), attributes.ports, attributes.max_work_requests), ("1.2.3", 2, 8192));
    assert_eq!(attributes.rss.unwrap().max_table_entries, 64);
    assert!(attributes.raw_packet.checksum && !attributes.raw_packet.vlan_strip);
    // The provider has only the old query.
    control.fail("query_device_ex", libc::EOPNOTSUPP);
    assert_eq!(context.attributes().unwrap().firmware, "old");
    let port = context.port(1).unwrap();
    assert_eq!((port.state, port.link_layer, port.speed), (PortState::Active, LinkLayer::Ethernet, Some(100_000)));
    let error = context.port(3).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EINVAL));
    assert!(error.to_string().starts_with("ibv_query_port on mana_0 port 3 failed: EINVAL"), "{error}");
    // The error names the interface that holds the port and the command that frees it.
    let minimal = minimal_port(&context);
    control.fail("ibv_create_qp", libc::EBUSY);
    let options = RawPacketQpOptions::send(&minimal.1, 64, 1, "second");
    let error = RawPacketQp::new(&minimal.0, &options).unwrap_err().to_string();
    assert!(error.starts_with("ibv_create_qp on mana_0 port 1 failed: EBUSY"), "{error}");
    assert!(error.ends_with("ip link set dev eth1 down"), "{error}");
    drop((minimal, options, context));
    control.assert_clean();
}

/// Creates a parent domain and a completion queue.
fn minimal_port(context: &Context) -> (ParentDomain, CompletionQueue) {
    let mana = Mana::from_context(context).unwrap();
    mana.set_allocator(Arc::new(BufferAllocator::builder().huge_pages(false).build())).unwrap();
    let domain = ProtectionDomain::new(context).unwrap();
    let completions = CompletionQueue::new(context, &CompletionQueueOptions::new(64, "send")).unwrap();
    (mana.parent_domain(&domain, 1).unwrap(), completions)
}

#[test]
fn every_drop_order_is_safe() {
    on_stubs!("stubs::every_drop_order_is_safe");
    let control = {
        drop(open());
        Control::new()
    };
    drop_in_every_order(port, || control.assert_clean());
}

#[test]
fn queues_use_allocator_memory_and_keep_their_parents() {
    on_stubs!("stubs::queues_use_allocator_memory_and_keep_their_parents");
    let all = port();
    let control = Control::new();
    let owners: Vec<String> = all.buffers.usage().iter().map(ToString::to_string).collect();
    assert_eq!(
        owners,
        [
            "receive 0: completions: 16384 bytes in 1 buffers",
            "receive 0: requests: 8192 bytes in 1 buffers",
            "send 0: completions: 8192 bytes in 1 buffers",
            "send 0: requests: 131072 bytes in 1 buffers",
        ]
    );
    let send = all.mana.send_queue(&all.pair).unwrap();
    assert_eq!((send.ring.bytes(), send.requests, send.id, send.vport_offset), (131_072, 256, 21, 5));
    let completions = all.mana.completion_queue(&all.send_completions).unwrap();
    assert_eq!((completions.ring.bytes(), completions.entries, completions.id), (6400, 100, 11));
    let receive = all.mana.receive_queue(&all.receive).unwrap();
    assert_eq!((receive.ring.bytes(), receive.requests, receive.id), (8192, 256, 31));
    // No send queue uses the receive completion queue, so it has no number.
    let error = all.mana.completion_queue(&all.receive_completions).unwrap_err().to_string();
    assert!(error.contains("before a queue pair uses it"), "{error}");
    // Another process maps the same doorbell page from the device file.
    let descriptor = all.context.cmd_fd().try_clone_to_owned().unwrap();
    let other = map_doorbells(std::os::fd::AsFd::as_fd(&descriptor)).unwrap();
    Doorbell::new(&send.doorbells, 0x400).ring(0x1234);
    assert_eq!(other.load64(0x400), 0x1234);
    // The views keep queues, domains and the context alive.
    let buffers = Arc::clone(&all.buffers);
    drop(all);
    assert!(control.live().contains(&("qp", 1)), "{:?}", control.live());
    send.ring.store64(send.ring.bytes() - 8, 1);
    completions.ring.store32(6396, 1);
    drop((send, completions));
    receive.ring.store64(0, 1);
    drop(receive);
    control.assert_clean();
    assert_eq!(buffers.usage(), []);
}

#[test]
fn invalid_library_answers_are_rejected() {
    on_stubs!("stubs::invalid_library_answers_are_rejected");
    let all = port();
    let control = Control::new();
    for (how, problem) in [(1, "bytes in memory of"), (2, "without memory"), (3, "without a doorbell page")] {
        control.corrupt_answers(how);
        let error = all.mana.send_queue(&all.pair).unwrap_err();
        assert!(matches!(&error, Error::InvalidAnswer { call: "manadv_init_obj", .. }), "{error}");
        assert!(error.to_string().contains(problem), "{error}");
        if how == 1 {
            assert!(matches!(all.mana.receive_queue(&all.receive), Err(Error::InvalidAnswer { .. })));
            assert!(matches!(all.mana.completion_queue(&all.send_completions), Err(Error::InvalidAnswer { .. })));
        }
    }
    drop(all);
    control.assert_clean();
}

#[test]
fn invalid_requests_never_reach_the_library() {
    on_stubs!("stubs::invalid_requests_never_reach_the_library");
    let all = port();
    let other = open();
    let control = Control::new();
    let refused = |result: Result<()>, why: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::InvalidRequest(_)), "{error}");
        assert!(error.to_string().contains(why), "{error}");
    };
    refused(all.mana.set_allocator(all.buffers.clone()).map(drop), "already");
    refused(CompletionQueue::new(&other, &CompletionQueueOptions::new(0, "")).map(drop), "0 entries");
    refused(CompletionQueue::new(&other, &CompletionQueueOptions::new(u32::MAX, "")).map(drop), "must be 1 to");
    refused(IndirectionTable::new(&[]).map(drop), "power of two");
    refused(IndirectionTable::new(&vec![all.receive.clone(); 3]).map(drop), "power of two");
    refused(
        WorkQueue::new(&all.parent, &WorkQueueOptions::new(&all.send_completions, 0, "")).map(drop),
        "at least one",
    );
    refused(
        WorkQueue::new(&all.parent, &WorkQueueOptions::new(&all.send_completions, u32::MAX, "")).map(drop),
        "too large",
    );
    // An allocator of queue memory is required first.
    refused(CompletionQueue::new(&other, &CompletionQueueOptions::new(64, "")).map(drop), "needs an allocator");
    // Objects of another device are rejected.
    let foreign = ProtectionDomain::new(&other).unwrap();
    refused(all.mana.parent_domain(&foreign, 1).map(drop), "belongs to");
    refused(
        RawPacketQp::new(&foreign, &RawPacketQpOptions::send(&all.send_completions, 1, 1, "")).map(drop),
        "own device",
    );
    refused(WorkQueue::new(&foreign, &WorkQueueOptions::new(&all.send_completions, 1, "")).map(drop), "own device");
    refused(RssQp::new(&foreign, &all.table, HashFields::NONE, &key()).map(drop), "own device");
    let mana = Mana::from_context(&other).unwrap();
    refused(mana.send_queue(&all.pair).map(drop), "belongs to");
    refused(mana.receive_queue(&all.receive).map(drop), "belongs to");
    refused(mana.completion_queue(&all.send_completions).map(drop), "belongs to");
    drop((foreign, mana, other, all));
    // The second context delays the release of the device list, and nothing else remains.
    assert_eq!(control.live(), []);
}

#[test]
fn failures_name_the_cause() {
    on_stubs!("stubs::failures_name_the_cause");
    let all = port();
    let control = Control::new();
    control.fail("ibv_create_qp", libc::EPERM);
    let options = RawPacketQpOptions::send(&all.send_completions, 64, 1, "x");
    let error = RawPacketQp::new(&all.parent, &options).unwrap_err();
    assert!(matches!(&error, Error::Call(CallError { cause: Cause::Capability("CAP_NET_RAW"), .. })), "{error}");
    control.fail("create_qp_ex", libc::ENODEV);
    let error = RssQp::new(&all.parent, &all.table, HashFields::IPV4, &key()).unwrap_err();
    assert!(matches!(&error, Error::Call(CallError { cause: Cause::PortBusy { .. }, .. })), "{error}");
    control.fail("ibv_reg_mr", libc::ENOMEM);
    let region = Arc::new(RegionBuilder::new(1).huge_pages(false).map().unwrap());
    let error = MemoryRegion::register(&all.domain, &region, Access::PACKETS).unwrap_err();
    assert!(matches!(&error, Error::Call(CallError { cause: Cause::LockedMemory { .. }, .. })), "{error}");
    // The provider cannot poll.
    let error = CompletionBatch::default().poll(&all.send_completions, 128).err().unwrap();
    assert_eq!(error.errno(), Some(libc::EOPNOTSUPP));
    // Queues of MANA have no state transitions.
    assert_eq!(all.receive.reset().unwrap_err().errno(), Some(libc::EOPNOTSUPP));
    drop((all, options));
    control.fail("ibv_open_device", libc::EACCES);
    let error = only_device().open().unwrap_err();
    assert!(error.to_string().contains("/dev/infiniband/uverbs0"), "{error}");
    control.fail("ibv_get_device_list", libc::ENOSYS);
    assert!(Verbs::load().unwrap().devices().unwrap().is_empty(), "missing kernel support is not an error");
    control.fail("ibv_get_device_list", libc::ENOMEM);
    assert_eq!(Verbs::load().unwrap().devices().unwrap_err().errno(), Some(libc::ENOMEM));
    control.assert_clean();
}

#[test]
fn registered_memory_stays_mapped() {
    on_stubs!("stubs::registered_memory_stays_mapped", ("STUB_LEAKS", PathBuf::from("yes")));
    let context = open();
    let control = Control::new();
    let domain = ProtectionDomain::new(&context).unwrap();
    let map = || Arc::new(RegionBuilder::new(1).huge_pages(false).map().unwrap());
    let region = map();
    let weak = Arc::downgrade(&region);
    let keys = [Access::default(), Access::PACKETS, Access { local_write: true, relaxed_ordering: true }]
        .map(|access| MemoryRegion::register(&domain, &region, access).unwrap());
    assert_eq!(keys.each_ref().map(MemoryRegion::lkey), [0x1000, 0x1001, 0x10_1001]);
    assert_eq!(keys[0].address(64, 10).unwrap(), region.base().as_ptr() as u64 + 64);
    assert!(keys[0].address(region.bytes(), 1).is_err() && keys[0].address(1, usize::MAX).is_err());
    drop(region);
    let [first, second, third] = keys;
    drop((first, second));
    assert!(weak.upgrade().is_some(), "the region was unmapped while it is registered");
    // If deregistration fails, the memory is kept until the device is closed.
    control.fail("ibv_dereg_mr", libc::EBUSY);
    drop(third);
    assert!(weak.upgrade().is_some(), "the region was unmapped while the device may write to it");
    drop((domain, context));
    assert!(weak.upgrade().is_none());
    let _: std::sync::Weak<Region> = weak;
}

#[test]
fn failed_destruction_is_logged_and_others_continue() {
    on_stubs!("stubs::failed_destruction_is_logged_and_others_continue", ("STUB_LEAKS", PathBuf::from("yes")));
    let all = port();
    let control = Control::new();
    let buffers = Arc::clone(&all.buffers);
    control.fail("ibv_destroy_qp", libc::EINVAL);
    // The queue pair is dropped first, and its destruction fails.
    let ManaPort {
        pair,
        context,
        mana,
        domain,
        parent,
        send_completions,
        receive_completions,
        receive,
        table,
        rss,
        ..
    } = all;
    drop(pair);
    drop((context, mana, domain, parent, send_completions, receive_completions, receive, table, rss));
    assert_eq!(buffers.usage().len(), 1, "memory of a queue that the device may access was freed");
    assert!(control.live().iter().all(|(kind, _)| ["qp"].contains(kind)), "{:?}", control.live());
}

#[test]
fn events_reach_the_application_and_are_acknowledged() {
    on_stubs!("stubs::events_reach_the_application_and_are_acknowledged");
    let all = port();
    let control = Control::new();
    let mut events = all.context.events().unwrap();
    assert!(matches!(all.context.events(), Err(Error::InvalidRequest(_))), "a second reader was created");
    assert_eq!(events.next_event().unwrap(), None, "no event is pending");
    let readable = |events: &AsyncEvents| {
        let mut poll = [rustix::event::PollFd::new(events, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut poll, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
    };
    assert!(!readable(&events));
    for (number, port) in [(10, 2), (9, 2), (8, 0), (1, 0), (0, 0), (99, 1)] {
        control.raise(number, port);
    }
    assert!(readable(&events));
    let mut seen = Vec::new();
    while let Some(event) = events.next_event().unwrap() {
        seen.push((event.kind, event.element));
    }
    let pair = Element::Queue(all.pair.id());
    let completions = Element::Queue(all.receive_completions.id());
    assert_eq!(
        seen,
        [
            (EventKind::PortDown, Element::Port(2)),
            (EventKind::PortActive, Element::Port(2)),
            (EventKind::DeviceFatal, Element::Device),
            (EventKind::QueuePairFatal, pair),
            (EventKind::CompletionQueueError, completions),
            (EventKind::Other(99), Element::Port(1)),
        ]
    );
    // All events must be acknowledged, or destructions would block. The stub checks this.
    drop(all);
    drop(events);
    control.assert_clean();
    let context = open();
    drop(context.events().unwrap());
    drop(context.events().unwrap());
}

#[test]
fn completion_channel_reports_its_queue() {
    on_stubs!("stubs::completion_channel_reports_its_queue");
    let context = open();
    let control = Control::new();
    Mana::from_context(&context)
        .unwrap()
        .set_allocator(Arc::new(BufferAllocator::builder().huge_pages(false).build()))
        .unwrap();
    let channel = CompletionChannel::new(&context).unwrap();
    let options = CompletionQueueOptions { channel: Some(channel.clone()), ..CompletionQueueOptions::new(64, "x") };
    let queue = CompletionQueue::new(&context, &options).unwrap();
    queue.arm().unwrap();
    assert_eq!(channel.next_event().unwrap(), None);
    control.complete();
    assert_eq!(channel.next_event().unwrap(), Some(queue.id()));
    assert_eq!(channel.next_event().unwrap(), None);
    drop((channel, options, context, queue));
    control.assert_clean();
}

mod gaudi {
    use std::net::Ipv4Addr;

    use wirepath_verbs::hbl::*;

    use super::*;

    /// Attributes of the last encapsulation.
    #[repr(C)]
    struct EncapAttributes {
        pointer: u64,
        bytes: u32,
        source: u32,
        port: u32,
        detail: u16,
        kind: u32,
    }

    impl Control {
        fn set(&self, what: &[u8], value: i32) {
            // SAFETY: the type is that of the functions in hbl.c.
            unsafe { self.hbl.get::<unsafe extern "C" fn(c_int)>(what).unwrap()(value) };
        }

        fn last_encap(&self) -> (EncapAttributes, Vec<u8>) {
            // SAFETY: the types are those of the functions and of the structure in hbl.c, which returns valid pointers.
            unsafe {
                let attributes =
                    self.hbl.get::<unsafe extern "C" fn() -> *const EncapAttributes>(b"stub_last_encap").unwrap()()
                        .read();
                let header = self.hbl.get::<unsafe extern "C" fn() -> *const u8>(b"stub_last_header").unwrap()();
                let header = std::slice::from_raw_parts(header, attributes.bytes as usize).to_vec();
                (attributes, header)
            }
        }
    }

    const RESPONDER: Responder = Responder {
        peer: Peer { address: Ipv4Addr::new(10, 0, 0, 2), queue_pair: 7 },
        source_index: 0,
        path_mtu: 5,
        sequence: 0,
        local_key: 1,
        priority: 1,
    };
    const REQUESTER: Requester =
        Requester { sequence: 0, timeout: 14, retries: 7, remote_key: 2, peer_requests: 0, priority: 1 };

    fn core() -> std::os::fd::OwnedFd {
        tempfile::tempfile().unwrap().into()
    }

    fn over_udp() -> EncapConfig {
        let header: Vec<u8> = (0..32).collect();
        EncapConfig::new(Ipv4Addr::new(10, 0, 0, 1), EncapKind::OverUdp { destination_port: 4789 }, &header).unwrap()
    }

    fn created(port: &Port, domain: &ProtectionDomain) -> QueuePair<Created> {
        let queue = port.completion_queue(&CompletionQueueOptions::new(64, "gaudi")).unwrap();
        let options = QueuePairOptions { send_requests: 64, receive_requests: 64 };
        port.create_queue_pair(domain, &queue, &queue, &options).unwrap()
    }

    const HBL: &str = "STUB_DEVICE";

    #[test]
    fn encap_outlives_queue_pairs_and_is_set_in_rtr_and_rts() {
        on_stubs!("stubs::gaudi::encap_outlives_queue_pairs_and_is_set_in_rtr_and_rts", (HBL, PathBuf::from("hbl_0")));
        let device = only_device();
        let hbl = Hbl::open(&device, core(), 0).unwrap();
        let control = Control::new();
        assert!(Hbl::is_supported(&device).unwrap());
        assert_eq!(hbl.capabilities().unwrap(), DeviceCapabilities { congestion_control: true, ports: 0b11110 });
        let domain = ProtectionDomain::new(hbl.context()).unwrap();
        for number in [1, 2] {
            let port = hbl.set_up_port(number, &PortSetup::new(16, 16)).unwrap();
            assert_eq!(port.limits().unwrap().encaps, 1);
            let encap = port.create_encap(&over_udp()).unwrap();
            // The ID of the first port is 0, which must be passed with its flag as well.
            assert_eq!(encap.id(), if number == 1 { 0 } else { 2 });
            let (attributes, header) = control.last_encap();
            assert_eq!((attributes.source, attributes.port), (0x0a00_0001, number));
            assert_eq!((attributes.detail, attributes.kind), (4789, 2));
            assert_eq!(header, over_udp().header());
            let pair = created(&port, &domain).initialize(WorkQueueKind::Write, false).unwrap();
            let pair = pair.ready_to_receive(&RESPONDER, Some(&encap)).unwrap();
            // Only the queue pair keeps it now. The stub detects an encapsulation that is destroyed first or passed
            // only once.
            drop(encap);
            assert!(control.live().contains(&("encap", 1)), "{:?}", control.live());
            let pair = pair.ready_to_send(&REQUESTER).unwrap();
            assert_eq!((pair.number(), pair.encap().unwrap().id()), (0x100 + number, if number == 1 { 0 } else { 2 }));
            drop((port, pair));
            assert!(!control.live().contains(&("encap", 1)), "{:?}", control.live());
        }
        // A pair without encapsulation passes none.
        let port = hbl.set_up_port(3, &PortSetup::new(16, 16)).unwrap();
        let pair = created(&port, &domain).initialize(WorkQueueKind::SendRendezvous, true).unwrap();
        let pair = pair.ready_to_receive(&RESPONDER, None).unwrap().ready_to_send(&REQUESTER).unwrap();
        assert!(pair.encap().is_none());
        drop((pair, port, domain, hbl, device));
        control.assert_clean();
    }

    #[test]
    fn refusals_are_reported_and_port_mismatch_is_checked() {
        on_stubs!("stubs::gaudi::refusals_are_reported_and_port_mismatch_is_checked", (HBL, PathBuf::from("hbl_0")));
        let device = only_device();
        let hbl = Hbl::open(&device, core(), 0b110).unwrap();
        let control = Control::new();
        let errno = |error: Error| error.errno();
        assert_eq!(
            Hbl::open(&device, core(), 0).map(drop).map_err(errno),
            Err(Some(libc::EBUSY)),
            "the device is in use"
        );
        assert_eq!(hbl.set_up_port(3, &PortSetup::new(1, 1)).map(drop).map_err(errno), Err(Some(libc::EINVAL)));
        let [one, two] = [1, 2].map(|number| hbl.set_up_port(number, &PortSetup::new(16, 16)).unwrap());
        // A Gaudi 2 supports one kind and one size.
        for (kind, bytes) in [
            (EncapKind::None, 0),
            (EncapKind::OverIpv4 { protocol: 47 }, 8),
            (EncapKind::OverUdp { destination_port: 4789 }, 8),
        ] {
            let what = EncapConfig::new(Ipv4Addr::LOCALHOST, kind, &vec![0; bytes]).unwrap();
            let error = one.create_encap(&what).unwrap_err();
            assert_eq!(error.errno(), Some(libc::EOPNOTSUPP), "{error}");
            assert!(error.to_string().starts_with("hbldv_create_encap on hbl_0 port 1 failed"), "{error}");
        }
        let first = one.create_encap(&over_udp()).unwrap();
        assert_eq!(
            one.create_encap(&over_udp()).unwrap_err().errno(),
            Some(libc::EBUSY),
            "the port has one encapsulation"
        );
        // An encapsulation of another port is rejected. The kernel would accept it.
        let domain = ProtectionDomain::new(hbl.context()).unwrap();
        let pair = created(&two, &domain).initialize(WorkQueueKind::Write, false).unwrap();
        let error = pair.ready_to_receive(&RESPONDER, Some(&first)).unwrap_err().to_string();
        assert!(error.contains("belongs to port 1, not to port 2 of hbl_0"), "{error}");
        // A failed transition destroys the pair.
        let pair = created(&two, &domain).initialize(WorkQueueKind::Write, false).unwrap();
        let error = pair.ready_to_receive(&Responder { priority: 4, ..RESPONDER }, None).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EINVAL), "{error}");
        drop(first);
        // Other NICs support other kinds. All of them reach the kernel unchanged.
        control.set(b"stub_any_size", 1);
        for (kind, code, detail, bytes) in [
            (EncapKind::None, 0, 0, 0),
            (EncapKind::OverIpv4 { protocol: 47 }, 1, 47, 8),
            (EncapKind::OverUdp { destination_port: 6081 }, 2, 6081, 12),
        ] {
            let what = EncapConfig::new(Ipv4Addr::new(192, 0, 2, 1), kind, &vec![7; bytes]).unwrap();
            let encap = two.create_encap(&what).unwrap();
            assert_eq!(encap.config(), &what);
            let (attributes, header) = control.last_encap();
            assert_eq!((attributes.kind, attributes.detail, attributes.port), (code, detail, 2));
            assert_eq!((attributes.source, header), (0xc000_0201, vec![7; bytes]));
        }
        // The ID has more bits than queue pairs have for it.
        control.set(b"stub_odd_id", 256);
        let error = two.create_encap(&over_udp()).unwrap_err();
        assert!(matches!(&error, Error::InvalidAnswer { call: "hbldv_create_encap", .. }), "{error}");
        // A failed destruction frees the library's memory, so it is not repeated.
        let encap = two.create_encap(&over_udp()).unwrap();
        control.fail("hbldv_destroy_encap", libc::EBUSY);
        drop((encap, domain, one, two, hbl, device));
        control.assert_clean();
    }

    #[test]
    fn another_device_is_refused() {
        on_stubs!("stubs::gaudi::another_device_is_refused", (HBL, PathBuf::from("mlx5_0")));
        let error = Hbl::open(&only_device(), core(), 0).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EOPNOTSUPP), "{error}");
        assert!(!Hbl::is_supported(&only_device()).unwrap());
        Control::new().assert_clean();
    }
}
