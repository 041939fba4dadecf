//! The objects against stand-ins for libibverbs and libmana, compiled from `stand_in/` with the installed headers: orders of dropping,
//! failures, events and answers that a real library does not give on demand. That real libraries agree is shown elsewhere.

// UNSAFETY: calls the stand-ins' functions that are there for tests.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use wirepath_memory::{BufferAllocator, Doorbell, Region, RegionBuilder};
use wirepath_testlab::{Need, require, skip_or_fail};
use wirepath_verbs::mana::{Mana, map_doorbells};
use wirepath_verbs::*;

const CASE: &str = "WIREPATH_TEST_STAND_IN_CASE";

/// Where there are no headers, tests are skipped.
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
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stand_in");
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

/// Runs the test `name` again in a process of its own on freshly compiled stand-ins; there, returns `true`.
fn on_stand_ins(name: &str, variables: &[(&str, PathBuf)]) -> bool {
    if std::env::var(CASE).is_ok_and(|case| case == name) {
        return true;
    }
    let directory = tempfile::tempdir().unwrap();
    compile(directory.path());
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(CASE, name).env(LIBRARY_DIRECTORY_VARIABLE, directory.path());
    let output = command.envs(variables.iter().map(|(name, value)| (name, value))).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    false
}

macro_rules! on_stand_ins {
    ($name:literal $(, $variable:expr)*) => {
        require!(Need::Program("cc"));
        if !headers() || !on_stand_ins($name, &[$($variable),*]) {
            return;
        }
    };
}

/// The stand-ins' own functions.
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
        // SAFETY: the stand-ins, loaded already.
        let open = |name: &str| unsafe { libloading::Library::new(directory.join(name)).unwrap() };
        Self { ibverbs: open("libibverbs.so.1"), mana: open("libmana.so.1"), hbl: open("libhbl.so.1") }
    }

    fn fail(&self, call: &str, errno: i32) {
        let call = CString::new(call).unwrap();
        // SAFETY: the type of the function in ibverbs.c; it copies the name.
        unsafe {
            let fail = self.ibverbs.get::<unsafe extern "C" fn(*const c_char, c_int)>(b"stand_in_fail").unwrap();
            fail(call.as_ptr(), errno);
        }
    }

    fn raise(&self, event: u32, port: i32) {
        // SAFETY: the type of the function in ibverbs.c.
        unsafe { self.ibverbs.get::<unsafe extern "C" fn(u32, c_int)>(b"stand_in_raise").unwrap()(event, port) };
    }

    fn complete(&self) {
        // SAFETY: the type of the function in ibverbs.c.
        unsafe { self.ibverbs.get::<unsafe extern "C" fn()>(b"stand_in_complete").unwrap()() };
    }

    fn lie(&self, how: i32) {
        // SAFETY: the type of the function in mana.c.
        unsafe { self.mana.get::<unsafe extern "C" fn(c_int)>(b"stand_in_lie").unwrap()(how) };
    }

    /// Objects that are alive, by kind.
    fn live(&self) -> Vec<(&'static str, i32)> {
        // SAFETY: the type of the function in ibverbs.c.
        let count = |kind: usize| unsafe {
            self.ibverbs.get::<unsafe extern "C" fn(c_int) -> c_int>(b"stand_in_live").unwrap()(kind as c_int)
        };
        (0..KINDS.len()).map(|kind| (KINDS[kind], count(kind))).filter(|(_, count)| *count != 0).collect()
    }

    /// Nothing is alive, and nothing happened that must not.
    fn assert_clean(&self) {
        // SAFETY: the type of the function in ibverbs.c; the text is static.
        let wrong = unsafe {
            CStr::from_ptr(self.ibverbs.get::<unsafe extern "C" fn() -> *const c_char>(b"stand_in_wrongs").unwrap()())
        };
        assert_eq!(wrong.to_str().unwrap(), "");
        assert_eq!(self.live(), []);
    }
}

fn open() -> Context {
    let mut devices = Verbs::load().unwrap().devices().unwrap();
    assert_eq!(devices.len(), 1);
    devices.remove(0).open().unwrap()
}

fn key() -> [u8; 40] {
    std::array::from_fn(|index| index as u8 + 1)
}

/// A port with one queue each way.
struct Everything {
    buffers: Arc<BufferAllocator>,
    context: Context,
    mana: Mana,
    domain: ProtectionDomain,
    parent: ParentDomain,
    send_completions: CompletionQueue,
    receive_completions: CompletionQueue,
    pair: RawPacketQp,
    receive: WorkQueue,
    table: IndirectionTable,
    rss: RssQp,
}

fn everything() -> Everything {
    let context = open();
    let mana = Mana::of(&context).unwrap();
    let buffers = Arc::new(BufferAllocator::builder().huge_pages(false).build());
    mana.set_allocator(buffers.clone()).unwrap();
    let domain = ProtectionDomain::new(&context).unwrap();
    let parent = mana.parent_domain(&domain, 1).unwrap();
    let send_completions = CompletionQueue::new(&context, &CompletionQueueOptions::new(100, "send 0")).unwrap();
    let receive_completions = CompletionQueue::new(&context, &CompletionQueueOptions::new(256, "receive 0")).unwrap();
    let pair = RawPacketQp::new(&parent, &RawPacketQpOptions::send(&send_completions, 256, 30, "send 0")).unwrap();
    let receive = WorkQueue::new(&parent, &WorkQueueOptions::new(&receive_completions, 256, "receive 0")).unwrap();
    receive.start().unwrap();
    let table = IndirectionTable::new(&[receive.clone(), receive.clone()]).unwrap();
    let rss = RssQp::new(&parent, &table, HashFields::IPV4, &key()).unwrap();
    Everything {
        buffers,
        context,
        mana,
        domain,
        parent,
        send_completions,
        receive_completions,
        pair,
        receive,
        table,
        rss,
    }
}

#[test]
fn a_device_tells_what_it_is() {
    let sysfs = tempfile::tempdir().unwrap();
    let interface = sysfs.path().join("device/net/eth1");
    std::fs::create_dir_all(&interface).unwrap();
    std::fs::write(interface.join("dev_port"), "0\n").unwrap();
    std::fs::write(interface.join("address"), "00:15:5d:01:02:03\n").unwrap();
    std::fs::write(interface.join("mtu"), "1500\n").unwrap();
    on_stand_ins!("a_device_tells_what_it_is", ("STAND_IN_SYSFS", sysfs.path().to_owned()));
    let context = open();
    let control = Control::new();
    let device = context.device();
    assert_eq!((device.name().as_str(), device.file().as_str()), ("mana_0", "/dev/infiniband/uverbs0"));
    assert_eq!(device.guid(), 0x0011_2233_4455_6677);
    let (name, mac) = ("eth1".to_owned(), [0, 0x15, 0x5d, 1, 2, 3]);
    assert_eq!(device.interfaces(), [Interface { name, port: 1, mac, mtu: Some(1500) }]);
    assert_eq!(context.provider(), Provider::Mana);
    assert_eq!(context.completion_vectors(), 4);
    let attributes = context.attributes().unwrap();
    assert_eq!((attributes.firmware.as_str(), attributes.ports, attributes.max_work_requests), ("1.2.3", 2, 8192));
    assert_eq!(attributes.rss.unwrap().max_table_entries, 64);
    assert!(attributes.raw_packet.checksum && !attributes.raw_packet.vlan_strip);
    // A provider that has only the old query.
    control.fail("query_device_ex", libc::EOPNOTSUPP);
    assert_eq!(context.attributes().unwrap().firmware, "old");
    let port = context.port(1).unwrap();
    assert_eq!((port.state, port.link_layer, port.speed), (PortState::Active, LinkLayer::Ethernet, Some(100_000)));
    let error = context.port(3).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EINVAL));
    assert!(error.to_string().starts_with("ibv_query_port on mana_0 port 3 failed: EINVAL"), "{error}");
    // The interface that is in the way is named with the command that frees the port.
    let everything = everything_on(&context);
    control.fail("ibv_create_qp", libc::EBUSY);
    let options = RawPacketQpOptions::send(&everything.1, 64, 1, "second");
    let error = RawPacketQp::new(&everything.0, &options).unwrap_err().to_string();
    assert!(error.starts_with("ibv_create_qp on mana_0 port 1 failed: EBUSY"), "{error}");
    assert!(error.ends_with("ip link set dev eth1 down"), "{error}");
    drop((everything, options, context));
    control.assert_clean();
}

fn everything_on(context: &Context) -> (ParentDomain, CompletionQueue) {
    let mana = Mana::of(context).unwrap();
    mana.set_allocator(Arc::new(BufferAllocator::builder().huge_pages(false).build())).unwrap();
    let domain = ProtectionDomain::new(context).unwrap();
    let completions = CompletionQueue::new(context, &CompletionQueueOptions::new(64, "send")).unwrap();
    (mana.parent_domain(&domain, 1).unwrap(), completions)
}

#[test]
fn no_order_of_dropping_is_wrong() {
    on_stand_ins!("no_order_of_dropping_is_wrong");
    let control = {
        drop(open());
        Control::new()
    };
    // Rotations of the order of making, forwards and backwards: each object goes first once, and last once.
    for rotation in 0..22 {
        let all = everything();
        let Everything {
            buffers,
            context,
            mana,
            domain,
            parent,
            send_completions,
            receive_completions,
            pair,
            receive,
            table,
            rss,
        } = all;
        let mut handles: Vec<Box<dyn std::any::Any>> = vec![
            Box::new(context),
            Box::new(mana),
            Box::new(domain),
            Box::new(parent),
            Box::new(send_completions),
            Box::new(receive_completions),
            Box::new(pair),
            Box::new(receive),
            Box::new(table),
            Box::new(rss),
        ];
        if rotation >= 11 {
            handles.reverse();
        }
        handles.rotate_left(rotation % 11 % 10);
        for handle in handles {
            drop(handle);
        }
        control.assert_clean();
        assert_eq!(buffers.usage(), [], "queue memory has leaked");
    }
}

#[test]
fn queues_lie_in_memory_of_ours_and_keep_what_they_need() {
    on_stand_ins!("queues_lie_in_memory_of_ours_and_keep_what_they_need");
    let all = everything();
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
    // Nothing completes in the other queue yet, by a sending pair: it has no number.
    let error = all.mana.completion_queue(&all.receive_completions).unwrap_err().to_string();
    assert!(error.contains("before a queue pair uses it"), "{error}");
    // The page of registers is that of the device file, also in another process.
    let descriptor = all.context.descriptor().try_clone_to_owned().unwrap();
    let other = map_doorbells(std::os::fd::AsFd::as_fd(&descriptor)).unwrap();
    Doorbell::new(&send.doorbells, 0x400).ring(0x1234);
    assert_eq!(other.load64(0x400), 0x1234);
    // The views alone keep queues, domains and the context.
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
fn what_a_library_says_is_not_believed() {
    on_stand_ins!("what_a_library_says_is_not_believed");
    let all = everything();
    let control = Control::new();
    for (how, problem) in [(1, "bytes in memory of"), (2, "without memory"), (3, "without a page of registers")] {
        control.lie(how);
        let error = all.mana.send_queue(&all.pair).unwrap_err();
        assert!(matches!(&error, Error::Answer { call: "manadv_init_obj", .. }), "{error}");
        assert!(error.to_string().contains(problem), "{error}");
        if how == 1 {
            assert!(matches!(all.mana.receive_queue(&all.receive), Err(Error::Answer { .. })));
            assert!(matches!(all.mana.completion_queue(&all.send_completions), Err(Error::Answer { .. })));
        }
    }
    drop(all);
    control.assert_clean();
}

#[test]
fn requests_that_cannot_be_are_refused_before_a_library_sees_them() {
    on_stand_ins!("requests_that_cannot_be_are_refused_before_a_library_sees_them");
    let all = everything();
    let other = open();
    let control = Control::new();
    let refused = |result: Result<()>, why: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Request(_)), "{error}");
        assert!(error.to_string().contains(why), "{error}");
    };
    refused(all.mana.set_allocator(all.buffers.clone()).map(drop), "already");
    refused(CompletionQueue::new(&other, &CompletionQueueOptions::new(0, "")).map(drop), "0 entries");
    refused(CompletionQueue::new(&other, &CompletionQueueOptions::new(u32::MAX, "")).map(drop), "are possible");
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
    // Queue memory comes first.
    refused(CompletionQueue::new(&other, &CompletionQueueOptions::new(64, "")).map(drop), "needs an allocator");
    // Objects of another device.
    let foreign = ProtectionDomain::new(&other).unwrap();
    refused(all.mana.parent_domain(&foreign, 1).map(drop), "object of");
    refused(
        RawPacketQp::new(&foreign, &RawPacketQpOptions::send(&all.send_completions, 1, 1, "")).map(drop),
        "own device",
    );
    refused(WorkQueue::new(&foreign, &WorkQueueOptions::new(&all.send_completions, 1, "")).map(drop), "own device");
    refused(RssQp::new(&foreign, &all.table, HashFields::NONE, &key()).map(drop), "own device");
    let mana = Mana::of(&other).unwrap();
    refused(mana.send_queue(&all.pair).map(drop), "object of");
    refused(mana.receive_queue(&all.receive).map(drop), "object of");
    refused(mana.completion_queue(&all.send_completions).map(drop), "object of");
    drop((foreign, mana, other, all));
    // The second context stood in the way of the first one's list and of nothing else.
    assert_eq!(control.live(), []);
}

#[test]
fn failures_name_the_cause() {
    on_stand_ins!("failures_name_the_cause");
    let all = everything();
    let control = Control::new();
    control.fail("ibv_create_qp", libc::EPERM);
    let options = RawPacketQpOptions::send(&all.send_completions, 64, 1, "x");
    let error = RawPacketQp::new(&all.parent, &options).unwrap_err();
    assert!(matches!(&error, Error::Call(CallError { cause: Cause::Capability("CAP_NET_RAW"), .. })), "{error}");
    control.fail("create_qp_ex", libc::ENODEV);
    let error = RssQp::new(&all.parent, &all.table, HashFields::IPV4, &key()).unwrap_err();
    assert!(matches!(&error, Error::Call(CallError { cause: Cause::PortHeld { .. }, .. })), "{error}");
    control.fail("ibv_reg_mr", libc::ENOMEM);
    let region = Arc::new(RegionBuilder::new(1).huge_pages(false).map().unwrap());
    let error = MemoryRegion::register(&all.domain, &region, Access::PACKETS).unwrap_err();
    assert!(matches!(&error, Error::Call(CallError { cause: Cause::LockedMemory { .. }, .. })), "{error}");
    // Polling through a provider that cannot.
    let error = all.send_completions.poll(&mut [WorkCompletion::default(); 128]).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EOPNOTSUPP));
    // MANA's queues have no states to go through.
    assert_eq!(all.receive.reset().unwrap_err().errno(), Some(libc::EOPNOTSUPP));
    drop((all, options));
    control.fail("ibv_open_device", libc::EACCES);
    let error = Verbs::load().unwrap().devices().unwrap().remove(0).open().unwrap_err();
    assert!(error.to_string().contains("/dev/infiniband/uverbs0"), "{error}");
    control.fail("ibv_get_device_list", libc::ENOSYS);
    assert!(Verbs::load().unwrap().devices().unwrap().is_empty(), "no kernel support is no error");
    control.fail("ibv_get_device_list", libc::ENOMEM);
    assert_eq!(Verbs::load().unwrap().devices().unwrap_err().errno(), Some(libc::ENOMEM));
    control.assert_clean();
}

#[test]
fn registered_memory_stays_mapped() {
    on_stand_ins!("registered_memory_stays_mapped", ("STAND_IN_LEAKS", PathBuf::from("yes")));
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
    assert!(weak.upgrade().is_some(), "unmapped while it is registered");
    // A registration that cannot be ended keeps the memory until the device is closed.
    control.fail("ibv_dereg_mr", libc::EBUSY);
    drop(third);
    assert!(weak.upgrade().is_some(), "unmapped while the device may write it");
    drop((domain, context));
    assert!(weak.upgrade().is_none());
    let _: std::sync::Weak<Region> = weak;
}

#[test]
fn a_destruction_that_fails_is_logged_and_the_rest_goes_on() {
    on_stand_ins!("a_destruction_that_fails_is_logged_and_the_rest_goes_on", ("STAND_IN_LEAKS", PathBuf::from("yes")));
    let all = everything();
    let control = Control::new();
    let buffers = Arc::clone(&all.buffers);
    control.fail("ibv_destroy_qp", libc::EINVAL);
    // The queue pair is the first to go, and fails.
    let Everything {
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
    assert_eq!(buffers.usage().len(), 1, "the memory of a queue that may still be read is not given away");
    assert!(control.live().iter().all(|(kind, _)| ["qp"].contains(kind)), "{:?}", control.live());
}

#[test]
fn events_reach_the_application_and_are_acknowledged() {
    on_stand_ins!("events_reach_the_application_and_are_acknowledged");
    let all = everything();
    let control = Control::new();
    let mut events = all.context.events().unwrap();
    assert!(matches!(all.context.events(), Err(Error::Request(_))), "two readers");
    assert_eq!(events.next_event().unwrap(), None, "never waits");
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
    // Every one was acknowledged, or the destructions would wait for ever (the stand-in tells).
    drop(all);
    drop(events);
    control.assert_clean();
    let context = open();
    drop(context.events().unwrap());
    drop(context.events().unwrap());
}

#[test]
fn a_channel_wakes_for_its_queue() {
    on_stand_ins!("a_channel_wakes_for_its_queue");
    let context = open();
    let control = Control::new();
    Mana::of(&context).unwrap().set_allocator(Arc::new(BufferAllocator::builder().huge_pages(false).build())).unwrap();
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

    /// The attributes that the kernel got last: address, size, IPv4 address, port, detail, kind.
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
            // SAFETY: the type of the functions in hbl.c.
            unsafe { self.hbl.get::<unsafe extern "C" fn(c_int)>(what).unwrap()(value) };
        }

        fn last_encap(&self) -> (EncapAttributes, Vec<u8>) {
            // SAFETY: the types of the functions and of the struct in hbl.c.
            unsafe {
                let attributes =
                    self.hbl.get::<unsafe extern "C" fn() -> *const EncapAttributes>(b"stand_in_last_encap").unwrap()()
                        .read();
                let header = self.hbl.get::<unsafe extern "C" fn() -> *const u8>(b"stand_in_last_header").unwrap()();
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

    fn device() -> Device {
        Verbs::load().unwrap().devices().unwrap().remove(0)
    }

    fn core() -> std::os::fd::OwnedFd {
        tempfile::tempfile().unwrap().into()
    }

    fn over_udp() -> Encapsulation {
        let header: Vec<u8> = (0..32).collect();
        Encapsulation::new(Ipv4Addr::new(10, 0, 0, 1), EncapKind::OverUdp { destination_port: 4789 }, &header).unwrap()
    }

    fn created(port: &Port, domain: &ProtectionDomain) -> QueuePair<Created> {
        let queue = port.completions(&CompletionQueueOptions::new(64, "gaudi")).unwrap();
        let options = QueuePairOptions { send_requests: 64, receive_requests: 64 };
        port.queue_pair(domain, &queue, &queue, &options).unwrap()
    }

    const HBL: &str = "STAND_IN_DEVICE";

    #[test]
    fn an_encapsulation_outlives_its_queue_pairs_and_is_said_in_both_transitions() {
        on_stand_ins!(
            "gaudi::an_encapsulation_outlives_its_queue_pairs_and_is_said_in_both_transitions",
            (HBL, PathBuf::from("hbl_0"))
        );
        let device = device();
        let hbl = Hbl::open(&device, core(), 0).unwrap();
        let control = Control::new();
        assert!(Hbl::drives(&device).unwrap());
        assert_eq!(hbl.abilities().unwrap(), DeviceAbilities { congestion_control: true, ports: 0b11110 });
        let domain = ProtectionDomain::new(hbl.context()).unwrap();
        for number in [1, 2] {
            let port = hbl.set_up_port(number, &PortSetup::new(16, 16)).unwrap();
            assert_eq!(port.limits().unwrap().encaps, 1);
            let encap = port.encap(&over_udp()).unwrap();
            // The first port's number is 0: it must be said with its bit like any other.
            assert_eq!(encap.id(), if number == 1 { 0 } else { 2 });
            let (attributes, header) = control.last_encap();
            assert_eq!((attributes.source, attributes.port), (0x0a00_0001, number));
            assert_eq!((attributes.detail, attributes.kind), (4789, 2));
            assert_eq!(header, over_udp().header());
            let pair = created(&port, &domain).initialize(WorkQueueKind::Write, false).unwrap();
            let pair = pair.receive(&RESPONDER, Some(&encap)).unwrap();
            // Only the queue pair keeps it now; the stand-in notes an encapsulation that goes first, or is said once only.
            drop(encap);
            assert!(control.live().contains(&("encap", 1)), "{:?}", control.live());
            let pair = pair.send(&REQUESTER).unwrap();
            assert_eq!((pair.number(), pair.encap().unwrap().id()), (0x100 + number, if number == 1 { 0 } else { 2 }));
            drop((port, pair));
            assert!(!control.live().contains(&("encap", 1)), "{:?}", control.live());
        }
        // A pair without encapsulation says none.
        let port = hbl.set_up_port(3, &PortSetup::new(16, 16)).unwrap();
        let pair = created(&port, &domain).initialize(WorkQueueKind::SendRendezvous, true).unwrap();
        let pair = pair.receive(&RESPONDER, None).unwrap().send(&REQUESTER).unwrap();
        assert!(pair.encap().is_none());
        drop((pair, port, domain, hbl, device));
        control.assert_clean();
    }

    #[test]
    fn what_the_kernel_refuses_is_told_and_what_nobody_checks_is_checked() {
        on_stand_ins!(
            "gaudi::what_the_kernel_refuses_is_told_and_what_nobody_checks_is_checked",
            (HBL, PathBuf::from("hbl_0"))
        );
        let device = device();
        let hbl = Hbl::open(&device, core(), 0b110).unwrap();
        let control = Control::new();
        let errno = |error: Error| error.errno();
        assert_eq!(Hbl::open(&device, core(), 0).map(drop).map_err(errno), Err(Some(libc::EBUSY)), "one user");
        assert_eq!(hbl.set_up_port(3, &PortSetup::new(1, 1)).map(drop).map_err(errno), Err(Some(libc::EINVAL)));
        let [one, two] = [1, 2].map(|number| hbl.set_up_port(number, &PortSetup::new(16, 16)).unwrap());
        // A Gaudi 2 takes one kind and one size.
        for (kind, bytes) in [
            (EncapKind::None, 0),
            (EncapKind::OverIpv4 { protocol: 47 }, 8),
            (EncapKind::OverUdp { destination_port: 4789 }, 8),
        ] {
            let what = Encapsulation::new(Ipv4Addr::LOCALHOST, kind, &vec![0; bytes]).unwrap();
            let error = one.encap(&what).unwrap_err();
            assert_eq!(error.errno(), Some(libc::EOPNOTSUPP), "{error}");
            assert!(error.to_string().starts_with("hbldv_create_encap on hbl_0 port 1 failed"), "{error}");
        }
        let first = one.encap(&over_udp()).unwrap();
        assert_eq!(one.encap(&over_udp()).unwrap_err().errno(), Some(libc::EBUSY), "one for each port");
        // Of another port: the kernel would take it.
        let domain = ProtectionDomain::new(hbl.context()).unwrap();
        let pair = created(&two, &domain).initialize(WorkQueueKind::Write, false).unwrap();
        let error = pair.receive(&RESPONDER, Some(&first)).unwrap_err().to_string();
        assert!(error.contains("is of port 1, not of port 2 of hbl_0"), "{error}");
        // Transitions that are refused end the pair.
        let pair = created(&two, &domain).initialize(WorkQueueKind::Write, false).unwrap();
        let error = pair.receive(&Responder { priority: 4, ..RESPONDER }, None).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EINVAL), "{error}");
        drop(first);
        // Other NICs take other kinds; all of them reach the kernel as they are.
        control.set(b"stand_in_any_size", 1);
        for (kind, code, detail, bytes) in [
            (EncapKind::None, 0, 0, 0),
            (EncapKind::OverIpv4 { protocol: 47 }, 1, 47, 8),
            (EncapKind::OverUdp { destination_port: 6081 }, 2, 6081, 12),
        ] {
            let what = Encapsulation::new(Ipv4Addr::new(192, 0, 2, 1), kind, &vec![7; bytes]).unwrap();
            let encap = two.encap(&what).unwrap();
            assert_eq!(encap.encapsulation(), &what);
            let (attributes, header) = control.last_encap();
            assert_eq!((attributes.kind, attributes.detail, attributes.port), (code, detail, 2));
            assert_eq!((attributes.source, header), (0xc000_0201, vec![7; bytes]));
        }
        // A number that queue pairs have no room for.
        control.set(b"stand_in_odd_id", 256);
        let error = two.encap(&over_udp()).unwrap_err();
        assert!(matches!(&error, Error::Answer { call: "hbldv_create_encap", .. }), "{error}");
        // A destruction that is refused frees the library's memory all the same: no second try.
        let encap = two.encap(&over_udp()).unwrap();
        control.fail("hbldv_destroy_encap", libc::EBUSY);
        drop((encap, domain, one, two, hbl, device));
        control.assert_clean();
    }

    #[test]
    fn another_device_is_refused() {
        on_stand_ins!("gaudi::another_device_is_refused", (HBL, PathBuf::from("mlx5_0")));
        let error = Hbl::open(&device(), core(), 0).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EOPNOTSUPP), "{error}");
        assert!(!Hbl::drives(&device()).unwrap());
        Control::new().assert_clean();
    }
}
