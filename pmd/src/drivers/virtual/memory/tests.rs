use super::*;
use crate::port::{OpenPort, StartedPort};
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{Batch, Packet, Pool};
use wirepath_settings::Source;

fn full(pool: &Pool) -> bool {
    pool.available() == pool.capacity()
}

fn packet(pool: &Pool, len: usize, fill: u8) -> Packet {
    let mut packet = pool.take().unwrap();
    assert!(packet.extend_from_slice(&vec![fill; len], pool));
    packet
}

fn config(pool: &Pool, queues: u16, depth: u32) -> PortConfig {
    PortConfig {
        rx_queues: queues,
        tx_queues: queues,
        depth,
        mtu: 9202,
        ..PortConfig::new(PortId::new(7), pool.clone())
    }
}

fn start(plan: Box<dyn PortSpec>, config: PortConfig) -> StartedPort {
    OpenPort::open("port", plan).unwrap().configure(config).unwrap().start().unwrap()
}

fn send(port: &mut StartedPort, queue: usize, packet: Packet) -> usize {
    let mut batch = Batch::new();
    batch.push(packet).unwrap();
    port.tx[queue].transmit(&mut batch)
}

fn receive(port: &mut StartedPort, queue: usize) -> Vec<Vec<u8>> {
    let mut batch = Batch::new();
    let mut all = Vec::new();
    while port.rx[queue].receive(&mut batch) > 0 {
        all.extend(batch.iter().map(|packet| packet.segments().flatten().copied().collect()));
        batch.clear();
    }
    all
}

#[test]
fn packets_cross_in_order_without_a_copy() {
    let pool = Pool::new("p", 64).unwrap();
    let (a, b) = cable(Options::default());
    let (mut a, mut b) = (start(a, config(&pool, 1, 64)), start(b, config(&pool, 1, 64)));
    for (i, len) in [14, 60, 64, 1514, 2048, 2049, 9216].into_iter().enumerate() {
        let packet = packet(&pool, len, i as u8);
        let handle = packet.handle();
        assert_eq!(send(&mut a, 0, packet), 1);
        let mut batch = Batch::new();
        assert_eq!(b.rx[0].receive(&mut batch), 1);
        let got = batch.pop().unwrap();
        assert_eq!((got.handle(), got.len(), got.in_port()), (handle, len, Some(PortId::new(7))));
        assert!(got.segments().flatten().all(|&byte| byte == i as u8));
    }
    for i in 0..40 {
        send(&mut b, 0, packet(&pool, 60, i));
    }
    assert!(receive(&mut a, 0).iter().map(|frame| frame[0]).eq(0..40));
    assert_eq!((b.port.tx_statistics()[0].packets, a.port.rx_statistics()[0].bytes), (40, 40 * 60));
    drop((a, b));
    assert!(full(&pool));
}

#[test]
fn a_full_lane_leaves_the_rest_to_the_sender() {
    let pool = Pool::new("p", 64).unwrap();
    let (a, b) = cable(Options::default());
    let (mut a, mut b) = (start(a, config(&pool, 1, 1024)), start(b, config(&pool, 1, 10)));
    let mut batch: Batch = (0..16).map(|i| packet(&pool, 60, i)).collect();
    assert_eq!(a.tx[0].transmit(&mut batch), 10, "the depth of the receiver counts");
    assert_eq!(batch.iter().map(|p| p.data()[0]).collect::<Vec<_>>(), [10, 11, 12, 13, 14, 15]);
    assert_eq!(a.tx[0].transmit(&mut batch), 0);
    assert_eq!(receive(&mut b, 0).len(), 10);
    assert_eq!(a.tx[0].transmit(&mut batch), 6);
    assert_eq!(receive(&mut b, 0).len(), 6);
    let statistics = &a.port.tx_statistics()[0];
    assert_eq!((statistics.packets, statistics.dropped()), (16, 0));
}

#[test]
fn queues_keep_their_index() {
    let pool = Pool::new("p", 64).unwrap();
    let (a, b) = cable(Options::default());
    let (mut a, mut b) = (start(a, config(&pool, 4, 16)), start(b, config(&pool, 2, 16)));
    for queue in 0..4 {
        send(&mut a, queue, packet(&pool, 60, queue as u8));
        send(&mut b, queue % 2, packet(&pool, 60, queue as u8));
    }
    // Packets of different senders may arrive in any order.
    let firsts = |frames: Vec<Vec<u8>>| {
        let mut firsts: Vec<_> = frames.iter().map(|frame| frame[0]).collect();
        firsts.sort_unstable();
        firsts
    };
    assert_eq!((firsts(receive(&mut b, 0)), firsts(receive(&mut b, 1))), (vec![0, 2], vec![1, 3]));
    assert_eq!((firsts(receive(&mut a, 0)), firsts(receive(&mut a, 1))), (vec![0, 2], vec![1, 3]));
    assert!(receive(&mut a, 2).is_empty());
}

#[test]
fn the_link_is_up_while_both_sides_run() {
    let pool = Pool::new("p", 64).unwrap();
    let (a, b) = cable(Options::default());
    let mut a = start(a, config(&pool, 1, 16));
    assert_eq!((a.port.link(), a.port.events()), (Link::DOWN, vec![]));
    assert_eq!(send(&mut a, 0, packet(&pool, 60, 0)), 1);
    assert_eq!(a.port.tx_statistics()[0].drops, [(DropReason::LinkDown, 1)]);
    let mut b = start(b, config(&pool, 1, 16));
    assert_eq!((a.port.link(), a.port.events(), b.port.events()), (Link::UP, vec![PortEvent::Link(Link::UP)], vec![]));
    for round in 0..3 {
        assert_eq!(send(&mut a, 0, packet(&pool, 60, round)), 1);
        assert_eq!(receive(&mut b, 0).len(), 1);
        send(&mut a, 0, packet(&pool, 60, round));
        let stopped = b.port.stop(b.rx, b.tx).unwrap();
        assert!(full(&pool), "what was on its way came back");
        assert_eq!(a.port.events(), [PortEvent::Link(Link::DOWN)]);
        send(&mut a, 0, packet(&pool, 60, round));
        b = stopped.start().unwrap();
        assert!(receive(&mut b, 0).is_empty());
        assert_eq!(a.port.events(), [PortEvent::Link(Link::UP)]);
    }
    assert_eq!(a.port.tx_statistics()[0].drops, [(DropReason::LinkDown, 4)]);
    drop((a, b));
    assert!(full(&pool));
}

#[test]
fn stopping_under_traffic_loses_no_buffer() {
    let pool = Pool::new("p", 2048).unwrap();
    let (a, b) = cable(Options::default());
    let mut a = start(a, config(&pool, 1, 256));
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut batch = Batch::new();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                pool.take_batch(32, &mut batch);
                for packet in batch.iter_mut() {
                    packet.append(60);
                }
                a.tx[0].transmit(&mut batch);
                batch.clear();
                std::thread::yield_now();
            }
        });
        let mut b = OpenPort::open("b", b).unwrap().configure(config(&pool, 1, 256)).unwrap();
        for _ in 0..200 {
            let mut running = b.start().unwrap();
            let mut batch = Batch::new();
            while running.rx[0].receive(&mut batch) == 0 {
                std::thread::yield_now();
            }
            drop(batch);
            b = running.port.stop(running.rx, running.tx).unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    a.tx[0].reclaim();
    assert!(full(&pool));
}

#[test]
fn packets_keep_their_order_across_a_restart() {
    let pool = Pool::new("p", 512).unwrap();
    let (a, b) = cable(Options::default());
    let (mut a, mut b) = (start(a, config(&pool, 2, 256)), start(b, config(&pool, 1, 256)));
    for round in 0..4 {
        for n in 0..50 {
            send(&mut a, 0, packet(&pool, 60, round * 50 + n));
        }
        // A link that goes down and up also creates new rings.
        send(&mut a, 1, packet(&pool, 61, 255));
        let stopped = a.port.stop(a.rx, a.tx).unwrap();
        a = stopped.start().unwrap();
    }
    let mut got = Vec::new();
    let mut batch = Batch::new();
    while got.len() < 204 {
        assert!(b.rx[0].receive(&mut batch) > 0, "{}", got.len());
        got.extend(batch.iter().map(|packet| packet.data()[0]));
        batch.clear();
    }
    assert_eq!(got.iter().filter(|n| **n == 255).count(), 4);
    got.retain(|n| *n != 255);
    assert!(got.into_iter().eq(0..200));
    drop((a, b));
    assert!(full(&pool));
}

#[test]
fn two_senders_share_a_receiver_fairly() {
    let pool = Pool::new("p", 1024).unwrap();
    let (a, b) = cable(Options::default());
    let (mut a, mut b) = (start(a, config(&pool, 2, 128)), start(b, config(&pool, 1, 128)));
    let mut counts = [0; 2];
    for _ in 0..20 {
        for queue in 0..2 {
            let mut batch: Batch = (0..64).map(|_| packet(&pool, 60, queue as u8)).collect();
            a.tx[queue].transmit(&mut batch);
        }
        let mut batch = Batch::new();
        b.rx[0].receive(&mut batch);
        batch.iter().for_each(|packet| counts[usize::from(packet.data()[0])] += 1);
    }
    assert_eq!(counts, [640, 640]);
}

#[test]
fn configured_ports_find_each_other_by_name() {
    let pool = Pool::new("p", 16).unwrap();
    let source = Source::new(
        "c.toml",
        "[[port]]\nname = 'x'\ndriver = 'memory'\ndevice = 'by-name'\n\
         [[port]]\nname = 'y'\ndriver = 'memory'\ndevice = 'by-name'\n\
         [[port]]\nname = 'z'\ndriver = 'memory'\ndevice = 'by-name'\n",
    );
    let document = source.parse().unwrap();
    let ports: Vec<_> = document.settings().tables("port").unwrap();
    let mut open = ports.into_iter().map(|port| {
        let settings = crate::drivers::plan(port).unwrap();
        OpenPort::open(settings.name, settings.plan)
    });
    let x = open.next().unwrap().unwrap().configure(config(&pool, 1, 16)).unwrap();
    let y = open.next().unwrap().unwrap().configure(config(&pool, 1, 16)).unwrap();
    let third = open.next().unwrap().unwrap_err().to_string();
    assert!(third.starts_with("memory: by-name: both ends of this cable are in use"), "{third}");
    assert_ne!(x.capabilities().mac, y.capabilities().mac);
    let (mut x, mut y) = (x.start().unwrap(), y.start().unwrap());
    send(&mut x, 0, packet(&pool, 60, 1));
    assert_eq!(receive(&mut y, 0).len(), 1);
    drop((x, y));
    let mut again = Endpoint::named("by-name", &config(&pool, 1, 16)).unwrap();
    assert_eq!(again.link(), Link::DOWN, "a new cable without another end");
}

#[test]
fn a_port_without_a_name_is_refused() {
    let source = Source::new("c.toml", "[[port]]\nname = 'x'\ndriver = 'memory'\n");
    let document = source.parse().unwrap();
    let error = crate::drivers::plan(document.settings().tables("port").unwrap().remove(0)).unwrap_err().to_string();
    assert!(error.contains("device: missing"), "{error}");
}

#[test]
fn frames_of_invalid_length_are_dropped_and_counted() {
    let pool = Pool::new("p", 64).unwrap();
    let (a, b) = cable(Options::default());
    let (mut a, mut b) = (start(a, config(&pool, 1, 16)), start(b, PortConfig::new(PortId::new(1), pool.clone())));
    assert_eq!(send(&mut a, 0, packet(&pool, 13, 0)), 1);
    assert_eq!(send(&mut a, 0, packet(&pool, 9225, 0)), 1);
    assert_eq!(a.port.tx_statistics()[0].drops, [(DropReason::TooLong, 1), (DropReason::TooShort, 1)]);
    assert_eq!(send(&mut a, 0, packet(&pool, 2000, 0)), 1);
    assert!(receive(&mut b, 0).is_empty(), "longer than the receiver's MTU");
    assert_eq!(b.port.rx_statistics()[0].drops, [(DropReason::TooLong, 1)]);
    drop((a, b));
    assert!(full(&pool));
}

#[test]
fn sender_metadata_is_cleared_after_software_offloads() {
    let pool = Pool::new("p", 4).unwrap();
    let (mut end, plan) = Endpoint::new(&Options::default(), &config(&pool, 1, 16)).unwrap();
    let mut port = start(plan, config(&pool, 1, 16));
    let mut noted = packet(&pool, 60, 1);
    noted.set_app([1, 2]);
    noted.set_mark(3);
    noted.set_timestamp(4);
    noted.set_vlan(5);
    end.send(noted).unwrap();
    let mut batch = Batch::new();
    assert_eq!(port.rx[0].receive(&mut batch), 1);
    let got = batch.pop().unwrap();
    assert_eq!((got.app(), got.flags(), got.len()), ([0, 0], Flags::NONE, 64));
    assert_eq!(got.data()[12..16], [0x81, 0, 0, 5]);
}

#[test]
fn an_endpoint_is_a_peer() {
    let pool = Pool::new("p", 64).unwrap();
    let (mut end, plan) = Endpoint::new(&Options::default(), &config(&pool, 2, 4)).unwrap();
    let mut port = start(plan, config(&pool, 2, 4));
    assert!(end.send_bytes(&[1; 60]) && end.send_on(1, packet(&pool, 60, 2)).is_ok());
    assert_eq!((receive(&mut port, 0), receive(&mut port, 1)), (vec![vec![1; 60]], vec![vec![2; 60]]));
    for i in 0..4 {
        send(&mut port, 1, packet(&pool, 60, i));
    }
    assert_eq!(end.receive_bytes(), Some(vec![0; 60]));
    assert_eq!(end.receive_within(std::time::Duration::ZERO).unwrap().data()[0], 1);
    assert_eq!(end.received().packets, 4, "taken ahead");
    for _ in 0..4 {
        assert!(end.send_bytes(&[0; 60]));
    }
    assert!(!end.send_bytes(&[0; 60]), "full");
    end.set_link(false);
    assert_eq!((port.port.link(), port.port.events()), (Link::DOWN, vec![PortEvent::Link(Link::DOWN)]));
    assert!(end.send_bytes(&[0; 60]));
    assert_eq!(end.sent().drops, [(DropReason::LinkDown, 1)]);
    end.set_link(true);
    assert_eq!(port.port.events(), [PortEvent::Link(Link::UP)]);
    end.cut();
    let events = port.port.events();
    let lost = PortEvent::Lost("memory cable 'cable' was cut".into());
    assert_eq!(events, [PortEvent::Link(Link::DOWN), lost]);
    assert!(port.port.events().is_empty());
    send(&mut port, 0, packet(&pool, 60, 0));
    assert_eq!(port.port.tx_statistics()[0].drops, [(DropReason::DeviceLost, 1)]);
    assert_eq!(receive(&mut port, 0).len(), 4, "received before");
    let stopped = port.port.stop(port.rx, port.tx).unwrap();
    assert!(stopped.start().unwrap_err().to_string().ends_with("the cable was cut"));
    drop(end);
    assert!(full(&pool));
}

#[test]
fn a_sleeping_reader_is_woken() {
    use rustix::event::{PollFd, PollFlags, poll};
    let pool = Pool::new("p", 64).unwrap();
    let (mut end, plan) = Endpoint::new(&Options::default(), &config(&pool, 1, 16)).unwrap();
    let mut port = start(plan, config(&pool, 1, 16));
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    for _ in 0..3 {
        let bell = port.rx[0].wait_descriptor().unwrap();
        assert_eq!(poll(&mut [PollFd::new(&bell, PollFlags::IN)], Some(&now)).unwrap(), 0);
        assert!(end.send_bytes(&[0; 60]));
        assert!(port.rx[0].wait_descriptor().is_none(), "there are packets");
        assert_eq!(receive(&mut port, 0).len(), 1);
        let bell = port.rx[0].wait_descriptor().unwrap();
        let packet = packet(&pool, 60, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| end.send(packet).unwrap());
            assert_eq!(poll(&mut [PollFd::new(&bell, PollFlags::IN)], None).unwrap(), 1);
        });
        assert_eq!(receive(&mut port, 0).len(), 1);
    }
}
