//! Tests with the real libibverbs and libmana on an emulated NIC. They write WQEs byte by byte, without a driver.

// UNSAFETY: accesses a region as device memory.
#![allow(unsafe_code)]

use std::sync::Arc;

use wirepath_memory::{Backing, BufferAllocator, DeviceMemory, Doorbell, Region, RegionBuilder};
use wirepath_nic_emulator::launch;
use wirepath_testlab::skip_or_fail;
use wirepath_verbs::mana::{CompletionRing, Mana, map_doorbells};
use wirepath_verbs::*;

use super::common::{ManaPort, drop_in_every_order, open};

const LOOP: &str = "[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'loop'\n";

/// Returns false and skips the test if rdma-core is not installed.
fn rdma_core_installed() -> bool {
    match Verbs::load() {
        Ok(_) => true,
        Err(error) => {
            skip_or_fail(file!(), line!(), &error.to_string());
            false
        }
    }
}

/// Creates a port on the emulated device.
fn port() -> Result<ManaPort> {
    ManaPort::create(open(), BufferAllocator::builder().build(), 2)
}

/// Waits for the CQE at `head` and returns its 64 bytes as words.
fn completion(ring: &CompletionRing, head: u32) -> [u32; 16] {
    let at = (head % ring.entries) as usize * 64;
    let owner = (head / ring.entries) & 7;
    let arrived = wirepath_testlab::eventually(std::time::Duration::from_secs(20), || {
        ring.ring.load32_acquire(at + 60) >> 29 == owner
    });
    assert!(arrived, "no completion");
    std::array::from_fn(|word| ring.ring.load32(at + word * 4))
}

#[test]
fn device_is_found_and_provider_identified() {
    if !rdma_core_installed() {
        return;
    }
    launch::run_test("emulated::device_is_found_and_provider_identified", LOOP, || {
        let context = open();
        assert_eq!(context.provider(), Provider::Mana);
        let attributes = context.attributes().unwrap();
        assert_eq!((attributes.vendor_id, attributes.ports), (0x1414, 1));
        assert!(attributes.max_work_requests >= 256);
        let port = context.port(1).unwrap();
        assert_eq!((port.state, port.link_layer), (PortState::Active, LinkLayer::Ethernet));
        assert!(context.port(2).is_err());
        assert!(
            context.device().interfaces().iter().any(|interface| interface.port == 1),
            "{:?}",
            context.device().interfaces()
        );
    });
}

#[test]
fn frame_loops_back_through_allocator_memory() {
    if !rdma_core_installed() {
        return;
    }
    launch::run_test("emulated::frame_loops_back_through_allocator_memory", LOOP, || {
        let port = port().unwrap();
        let region = Arc::new(RegionBuilder::new(1).map().unwrap());
        let memory = MemoryRegion::register(&port.domain, &region, Access::PACKETS).unwrap();
        let send = port.mana.send_queue(&port.pair).unwrap();
        let receive = port.mana.receive_queue(&port.receive).unwrap();
        let sent = port.mana.completion_queue(&port.send_completions).unwrap();
        let received = port.mana.completion_queue(&port.receive_completions).unwrap();
        assert_ne!(sent.id, received.id);
        let usage: Vec<String> = port.buffers.usage().into_iter().map(|usage| usage.owner).collect();
        assert_eq!(usage, ["receive 0: completions", "receive 0: requests", "send 0: completions", "send 0: requests"]);
        let backing = port.buffers.regions().unwrap()[0].backing;
        assert!(matches!(backing, Backing::HugePages | Backing::TransparentHugePages | Backing::NormalPages));

        // The first half of the region contains a broadcast frame, the second half a receive buffer.
        let frame: [u8; 64] = std::array::from_fn(|at| if at < 6 { 0xff } else { at as u8 });
        let bytes = view(&region);
        for (at, chunk) in frame.chunks_exact(8).enumerate() {
            bytes.store64(at * 8, u64::from_ne_bytes(chunk.try_into().unwrap()));
        }
        let buffer = memory.address(4096, 2048).unwrap();
        let descriptor = |ring: &DeviceMemory, oob: [u32; 2], address: u64, size: u32| {
            ring.store32(0, 0);
            ring.store32(4, 1 | 2 << 8);
            ring.store32(8, oob[0]);
            ring.store32(12, oob[1]);
            ring.store64(16, address);
            ring.store32(24, memory.lkey());
            ring.store32(28, size);
        };
        descriptor(&receive.ring, [0, 0], buffer, 2048);
        Doorbell::new(&receive.doorbells, 0x400).ring(u64::from(receive.id) | 32 << 32);
        let oob = [sent.id << 8, (send.id >> 10 & 0x3fff) << 10 | send.vport_offset << 24];
        descriptor(&send.ring, oob, memory.address(0, 64).unwrap(), 64);
        Doorbell::new(&send.doorbells, 0).ring(u64::from(send.id) | 32 << 32);

        let done = completion(&sent, sent.entries);
        assert_eq!((done[0] & 0x3f, done[15] & 0xff_ffff), (32, send.id));
        let done = completion(&received, received.entries);
        assert_eq!((done[0] & 0x3f, done[15] & 0xff_ffff), (1, receive.id));
        assert_eq!(done[2] & 0xffff, 64, "length of the frame");
        for (at, chunk) in frame.chunks_exact(8).enumerate() {
            assert_eq!(bytes.load64(4096 + at * 8), u64::from_ne_bytes(chunk.try_into().unwrap()));
        }

        // The port is dropped first, then the views. All queue memory must be free afterwards.
        let buffers = Arc::clone(&port.buffers);
        drop(port);
        drop((memory, send, receive, sent, received));
        assert_eq!(buffers.usage(), []);
    });
}

/// Returns a view of the region as device memory.
fn view(region: &Arc<Region>) -> DeviceMemory {
    let keep: Arc<dyn std::any::Any + Send + Sync> = region.clone();
    // SAFETY: `keep` keeps the region mapped, and the tests access it only through views.
    unsafe { DeviceMemory::new(region.base(), region.bytes(), keep) }
}

#[test]
fn real_libraries_accept_every_drop_order() {
    if !rdma_core_installed() {
        return;
    }
    launch::run_test("emulated::real_libraries_accept_every_drop_order", LOOP, || {
        drop_in_every_order(|| port().unwrap(), || {});
    });
}

#[test]
fn missing_prerequisites_fail_before_the_library_call() {
    if !rdma_core_installed() {
        return;
    }
    launch::run_test("emulated::missing_prerequisites_fail_before_the_library_call", LOOP, || {
        let context = open();
        let options = CompletionQueueOptions::new(64, "x");
        assert!(matches!(CompletionQueue::new(&context, &options), Err(Error::InvalidRequest(_))));
        let port = ManaPort::create(context, BufferAllocator::builder().build(), 2).unwrap();
        // libmana rejects a domain that is not a parent domain.
        let options = RawPacketQpOptions::send(&port.send_completions, 64, 1, "x");
        let error = RawPacketQp::new(&port.domain, &options).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EINVAL), "{error}");
        // Queue pairs of MANA have no state transitions.
        assert_eq!(port.pair.set_state(QueuePairState::Initialized, 1).unwrap_err().errno(), Some(libc::EOPNOTSUPP));
        // Any process with the device file can map the doorbell page.
        let other = map_doorbells(port.context.cmd_fd()).unwrap();
        assert_eq!(other.bytes(), 4096);
    });
}

/// Runs a test on emulated NICs with a control socket. The test gets the path of the socket.
fn with_control(name: &str, test: impl FnOnce(&str)) {
    let folder = tempfile::tempdir().unwrap();
    let inside = std::env::var("WIREPATH_TEST_CONTROL");
    let control = inside.unwrap_or_else(|_| folder.path().join("control").to_str().unwrap().to_owned());
    let topology = format!("control = '{control}'\n{LOOP}");
    launch::run_test_with_env(name, &topology, &[("WIREPATH_TEST_CONTROL", &control)], || test(&control));
}

/// Injects a fault through the control socket.
fn order(control: &str, fault: &str) {
    use std::io::{Read, Write};
    let mut stream = std::os::unix::net::UnixStream::connect(control).unwrap();
    stream.write_all(format!("{fault}\n\n").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert_eq!(answer.trim(), "injected", "{fault}");
}

/// Waits up to 20 s for the next event.
fn event(events: &mut AsyncEvents) -> AsyncEvent {
    let mut found = None;
    wirepath_testlab::eventually(std::time::Duration::from_secs(20), || {
        found = events.next_event().unwrap();
        found.is_some()
    });
    found.expect("an event")
}

#[test]
fn emulated_busy_port_error_names_the_command() {
    if !rdma_core_installed() {
        return;
    }
    for errno in ["EBUSY", "ENODEV"] {
        let topology = format!("{LOOP}[[fault]]\nkind = 'port-held'\nerrno = '{errno}'\n");
        launch::run_test("emulated::emulated_busy_port_error_names_the_command", &topology, || {
            let error = port().err().expect("the port is busy");
            assert!(
                matches!(&error, Error::Call(CallError { call: "ibv_create_qp", cause: Cause::PortBusy { .. }, .. })),
                "{error}"
            );
            let interface = open().device().interfaces().remove(0).name;
            assert!(error.to_string().ends_with(&format!("ip link set dev {interface} down")), "{error}");
        });
    }
}

#[test]
fn memlock_error_names_the_limit() {
    if !rdma_core_installed() {
        return;
    }
    let topology = format!("{LOOP}[[fault]]\nkind = 'refuse'\ncommand = 'reg_mr'\nerrno = 'ENOMEM'\n");
    launch::run_test("emulated::memlock_error_names_the_limit", &topology, || {
        let context = open();
        let domain = ProtectionDomain::new(&context).unwrap();
        let region = Arc::new(RegionBuilder::new(1).map().unwrap());
        let error = MemoryRegion::register(&domain, &region, Access::PACKETS).unwrap_err();
        assert!(matches!(&error, Error::Call(CallError { cause: Cause::LockedMemory { .. }, .. })), "{error}");
        // The fault applies once.
        MemoryRegion::register(&domain, &region, Access::PACKETS).unwrap();
    });
}

#[test]
fn events_arrive_and_a_reset_device_reopens() {
    if !rdma_core_installed() {
        return;
    }
    with_control("emulated::events_arrive_and_a_reset_device_reopens", |control| {
        let first = port().unwrap();
        let mut events = first.context.events().unwrap();
        assert_eq!(events.next_event().unwrap(), None);
        order(control, "kind = 'port-down'");
        assert_eq!(event(&mut events), AsyncEvent { kind: EventKind::PortDown, element: Element::Port(1) });
        assert_ne!(first.context.port(1).unwrap().state, PortState::Active);
        order(control, "kind = 'port-up'");
        assert_eq!(event(&mut events), AsyncEvent { kind: EventKind::PortActive, element: Element::Port(1) });
        assert_eq!(first.context.port(1).unwrap().state, PortState::Active);

        order(control, "kind = 'device-fatal'");
        assert_eq!(event(&mut events), AsyncEvent { kind: EventKind::DeviceFatal, element: Element::Device });
        let error = first.context.attributes().unwrap_err();
        assert!(matches!(&error, Error::Call(CallError { cause: Cause::DeviceLost, .. })), "{error}");
        // Objects that the kernel has destroyed can still be dropped, and their memory is freed.
        let buffers = Arc::clone(&first.buffers);
        drop(first);
        drop(events);
        assert_eq!(buffers.usage(), []);
        drop(port().unwrap());
    });
}

#[test]
fn objects_are_created_and_dropped_on_many_threads() {
    fn on_any_thread<T: Send + Sync>() {}
    on_any_thread::<(Device, Context, Mana, ProtectionDomain, ParentDomain, MemoryRegion)>();
    on_any_thread::<(CompletionChannel, CompletionQueue, RawPacketQp, WorkQueue, IndirectionTable, RssQp, AsyncEvents)>(
    );
    if !rdma_core_installed() {
        return;
    }
    launch::run_test("emulated::objects_are_created_and_dropped_on_many_threads", LOOP, || {
        const THREADS: usize = 4;
        let context = open();
        let mana = Mana::from_context(&context).unwrap();
        let buffers = Arc::new(BufferAllocator::builder().build());
        mana.set_allocator(buffers.clone()).unwrap();
        let domain = ProtectionDomain::new(&context).unwrap();
        let parent = mana.parent_domain(&domain, 1).unwrap();
        // Each thread drops the objects of its predecessor while it creates its own.
        let (senders, receivers): (Vec<_>, Vec<_>) =
            (0..THREADS).map(|_| std::sync::mpsc::channel::<Box<dyn std::any::Any + Send>>()).unzip();
        std::thread::scope(|scope| {
            for (thread, others) in receivers.into_iter().enumerate() {
                let next = senders[(thread + 1) % THREADS].clone();
                let (context, domain, parent) = (&context, &domain, &parent);
                scope.spawn(move || {
                    let region = Arc::new(RegionBuilder::new(1).map().unwrap());
                    for round in 0..40 {
                        let name = format!("{thread} {round}");
                        let own = ProtectionDomain::new(context).unwrap();
                        let memory = MemoryRegion::register(domain, &region, Access::PACKETS).unwrap();
                        let other = MemoryRegion::register(&own, &region, Access::PACKETS).unwrap();
                        assert_ne!(memory.lkey(), other.lkey());
                        let sent = CompletionQueue::new(context, &CompletionQueueOptions::new(64, &*name)).unwrap();
                        let received = CompletionQueue::new(context, &CompletionQueueOptions::new(64, &*name)).unwrap();
                        drop(others.try_recv());
                        let pair = RawPacketQp::new(parent, &RawPacketQpOptions::send(&sent, 64, 1, &*name)).unwrap();
                        let queue = WorkQueue::new(parent, &WorkQueueOptions::new(&received, 64, &*name)).unwrap();
                        queue.start().unwrap();
                        let table = IndirectionTable::new(std::slice::from_ref(&queue)).unwrap();
                        assert!(context.port(1).unwrap().speed.is_some());
                        // Parents come first: their children keep them alive.
                        let all: Box<dyn std::any::Any + Send> =
                            Box::new((own, sent, received, memory, other, queue, table, pair));
                        // If the next thread has ended, the objects are returned and dropped here.
                        drop(next.send(all));
                    }
                });
            }
            drop(senders);
        });
        assert_eq!(buffers.usage(), []);
        // Dropping the last pair freed the port. Only pairs of one domain may send on a port at a time.
        let other = mana.parent_domain(&ProtectionDomain::new(&context).unwrap(), 1).unwrap();
        let sent = CompletionQueue::new(&context, &CompletionQueueOptions::new(64, "last")).unwrap();
        drop(RawPacketQp::new(&other, &RawPacketQpOptions::send(&sent, 64, 1, "last")).unwrap());
    });
}

#[test]
fn context_closes_while_a_thread_polls_its_events() {
    if !rdma_core_installed() {
        return;
    }
    with_control("emulated::context_closes_while_a_thread_polls_its_events", |control| {
        for round in 0..40 {
            let all = port().unwrap();
            let mut events = all.context.events().unwrap();
            let queue = Element::Queue(all.receive.id());
            let (sender, receiver) = std::sync::mpsc::channel();
            // The reader of events is the last handle of the context, so dropping it closes the context.
            let reader = std::thread::spawn(move || {
                loop {
                    let readable = rustix::event::PollFd::new(&events, rustix::event::PollFlags::IN);
                    rustix::event::poll(&mut [readable], None).unwrap();
                    while let Some(event) = events.next_event().unwrap() {
                        sender.send(event).unwrap();
                        if event.element == Element::Port(1) {
                            return;
                        }
                    }
                }
            });
            // A buffer outside all regions stops the queue. The device reports that, possibly while the queue is
            // destroyed.
            let ring = all.mana.receive_queue(&all.receive).unwrap();
            ring.ring.store32(0, 0);
            ring.ring.store32(4, 1 | 2 << 8);
            ring.ring.store64(16, 4096);
            ring.ring.store32(24, 0xdead);
            ring.ring.store32(28, 2048);
            Doorbell::new(&ring.doorbells, 0x400).ring(u64::from(ring.id) | 32 << 32);
            let region = Arc::new(RegionBuilder::new(1).map().unwrap());
            let memory = MemoryRegion::register(&all.domain, &region, Access::PACKETS).unwrap();
            let send = all.mana.send_queue(&all.pair).unwrap();
            let sent = all.mana.completion_queue(&all.send_completions).unwrap();
            view(&region).store64(0, u64::MAX);
            send.ring.store32(4, 1 | 2 << 8);
            send.ring.store32(8, sent.id << 8);
            send.ring.store32(12, (send.id >> 10 & 0x3fff) << 10 | send.vport_offset << 24);
            send.ring.store64(16, memory.address(0, 64).unwrap());
            send.ring.store32(24, memory.lkey());
            send.ring.store32(28, 64);
            Doorbell::new(&send.doorbells, 0).ring(u64::from(send.id) | 32 << 32);
            let fatal = AsyncEvent { kind: EventKind::WorkQueueFatal, element: queue };
            let waits_for_event = round % 2 == 0;
            if waits_for_event {
                assert_eq!(receiver.recv().unwrap(), fatal);
            }
            let buffers = Arc::clone(&all.buffers);
            let port_goes_down = std::thread::spawn({
                let control = control.to_owned();
                move || order(&control, "kind = 'port-down'")
            });
            drop((all, ring, send, sent, memory));
            port_goes_down.join().unwrap();
            reader.join().unwrap();
            // The event of the queue arrives at most once, and only while the queue exists.
            let rest: Vec<_> = receiver.iter().filter(|event| *event == fatal).collect();
            assert!(rest.len() <= usize::from(!waits_for_event), "{rest:?}");
            assert_eq!(buffers.usage(), []);
            order(control, "kind = 'port-up'");
        }
    });
}
