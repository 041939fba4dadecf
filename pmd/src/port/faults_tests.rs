use super::*;
use crate::drivers::r#virtual::memory::{self, cable};
use crate::port::{OpenPort, StartedPort};
use wirepath_settings::Source;

fn start(plan: Box<dyn PortSpec>, pool: &Pool) -> StartedPort {
    let config = PortConfig { depth: 1024, ..PortConfig::new(PortId::new(3), pool.clone()) };
    OpenPort::open("port", plan).unwrap().configure(config).unwrap().start().unwrap()
}

/// Sends numbered frames by a port with faults to one without, or the other way round. Returns the frames that arrive.
struct Run {
    arrived: Vec<Vec<u8>>,
    faulty: StartedPort,
    plain: StartedPort,
    pool: Pool,
    /// Frames that the transmit queue took.
    sent: u64,
}

const FRAMES: u32 = 3000;

fn run(faults: Faults, is_tx: bool) -> Run {
    let pool = Pool::new("faults", 4096).unwrap();
    let (near, far) = cable(memory::Options::default());
    let (mut faulty, mut plain) = (start(inject(near, faults), &pool), start(far, &pool));
    let (mut arrived, mut sent, mut outgoing, mut incoming) = (Vec::new(), 0, Batch::new(), Batch::new());
    let mut next = 0;
    while next < FRAMES || !outgoing.is_empty() {
        while outgoing.len() < 20 && next < FRAMES {
            let mut packet = pool.take().unwrap();
            assert!(packet.extend_from_slice(&[&next.to_be_bytes()[..], &[0x5a; 60]].concat(), &pool));
            outgoing.push(packet).unwrap();
            next += 1;
        }
        let (tx, rx) = if is_tx { (&mut faulty, &mut plain) } else { (&mut plain, &mut faulty) };
        sent += tx.tx[0].transmit(&mut outgoing) as u64;
        rx.rx[0].receive(&mut incoming);
        arrived.extend(incoming.iter().map(|packet| packet.data().to_vec()));
        incoming.clear();
    }
    for _ in 0..20 {
        let (tx, rx) = if is_tx { (&mut faulty, &mut plain) } else { (&mut plain, &mut faulty) };
        tx.tx[0].reclaim();
        rx.rx[0].receive(&mut incoming);
        arrived.extend(incoming.iter().map(|packet| packet.data().to_vec()));
        incoming.clear();
    }
    Run { arrived, faulty, plain, pool, sent }
}

impl Run {
    fn numbers(&self) -> Vec<u32> {
        self.arrived.iter().map(|frame| u32::from_be_bytes(*frame.first_chunk().unwrap())).collect()
    }

    fn statistic(&mut self, name: &str) -> u64 {
        let all = self.faulty.port.extra_statistics();
        all.iter().find(|(found, _)| *found == name).unwrap_or_else(|| panic!("{name} in {all:?}")).1
    }

    /// Stops both ports and checks that no buffer is lost.
    fn stop(self) {
        let Self { faulty, plain, pool, .. } = self;
        for port in [faulty, plain] {
            port.port.stop(port.rx, port.tx).unwrap();
        }
        assert_eq!(pool.available(), pool.capacity());
    }
}

fn some() -> QueueFaults {
    QueueFaults { loss: 0.05, duplicate: 0.05, reorder: 0.05, distance: 7, corrupt: 0.05, full: 0.02, full_calls: 3 }
}

fn faults(seed: u64, is_tx: bool) -> Faults {
    let none = QueueFaults::default();
    let (rx, tx) = if is_tx { (none, some()) } else { (some(), none) };
    Faults { seed, rx, tx }
}

#[test]
fn equal_seeds_give_equal_faults() {
    for is_tx in [false, true] {
        let [first, again, other] = [7, 7, 8].map(|seed| {
            let mut run = run(faults(seed, is_tx), is_tx);
            let statistics = run.faulty.port.extra_statistics();
            let arrived = std::mem::take(&mut run.arrived);
            run.stop();
            (arrived, statistics)
        });
        assert_eq!(first, again, "tx {is_tx}");
        assert_ne!(first.0, other.0, "tx {is_tx}");
    }
}

#[test]
fn every_fault_is_counted_and_every_packet_too() {
    for is_tx in [false, true] {
        let mut run = run(faults(42, is_tx), is_tx);
        let direction = if is_tx { "tx" } else { "rx" };
        let [lost, twice, late, wrong] = ["losses", "duplicates", "reorderings", "corruptions"]
            .map(|kind| run.statistic(&format!("injected_{direction}_{kind}")));
        for (name, n) in [("lost", lost), ("twice", twice), ("late", late), ("wrong", wrong)] {
            assert!((75..300).contains(&n), "{direction} {name}: {n} of {FRAMES} at 5 %");
        }
        assert_eq!(run.sent, u64::from(FRAMES));
        assert_eq!(run.arrived.len() as u64, u64::from(FRAMES) - lost + twice);
        let changed = run.arrived.iter().filter(|frame| frame[4..] != [0x5a; 60]).count() as u64;
        assert!(changed > wrong / 2 && changed <= wrong + twice, "{changed} changed, {wrong} counted");
        let counters = if is_tx { run.faulty.tx[0].counters() } else { run.faulty.rx[0].counters() }.snapshot();
        assert_eq!(counters.drops, [(DropReason::InjectedFault, lost)]);
        assert_eq!(counters.injected_copies, twice);
        // received + copies = sent + dropped, for each direction of the queue.
        match is_tx {
            true => assert_eq!(run.sent + twice, counters.packets + lost),
            false => assert_eq!(counters.packets + twice, run.arrived.len() as u64),
        }
        assert_eq!(run.statistic("injected_tx_full_calls") > 0, is_tx);
        run.stop();
    }
}

#[test]
fn delayed_packets_are_passed_by_a_distance() {
    let rx = QueueFaults { reorder: 0.02, distance: 9, ..QueueFaults::default() };
    let run = run(Faults { seed: 1, rx, ..Faults::default() }, false);
    let numbers = run.numbers();
    let mut sorted = numbers.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..FRAMES).collect::<Vec<_>>(), "none is lost");
    let late: Vec<_> =
        numbers.iter().enumerate().map(|(at, n)| at as i64 - i64::from(*n)).filter(|by| *by > 0).collect();
    assert!(late.len() > 20 && late.iter().all(|by| *by <= 9), "{late:?}");
    assert!(late.iter().filter(|by| **by >= 8).count() > 20, "{late:?}");
    run.stop();
}

#[test]
fn certain_faults_and_none() {
    let plain = run(Faults { seed: 5, ..Faults::default() }, true);
    assert_eq!(plain.numbers(), (0..FRAMES).collect::<Vec<_>>());
    plain.stop();
    let rx = QueueFaults { loss: 1.0, ..QueueFaults::default() };
    let mut all_lost = run(Faults { seed: 5, rx, ..Faults::default() }, false);
    assert_eq!((all_lost.arrived.len(), all_lost.statistic("injected_rx_losses")), (0, u64::from(FRAMES)));
    all_lost.stop();
    // Delayed packets return to their pool, even if nobody asks for them.
    let rx = QueueFaults { reorder: 1.0, distance: 1000, ..QueueFaults::default() };
    let mut delayed = run(Faults { seed: 5, rx, ..Faults::default() }, false);
    assert_eq!(delayed.numbers(), (0..FRAMES).collect::<Vec<_>>());
    let mut batch = Batch::new();
    let mut packet = delayed.pool.take().unwrap();
    assert!(packet.extend_from_slice(&[0; 60], &delayed.pool));
    batch.push(packet).unwrap();
    delayed.plain.tx[0].transmit(&mut batch);
    assert_eq!((delayed.faulty.rx[0].receive(&mut batch), delayed.faulty.rx[0].waiting()), (0, Some(1)));
    delayed.stop();
}

#[test]
fn the_table_of_a_configuration() {
    let read = |table: &str| {
        let text = format!("[[port]]\nname = 'a'\ndriver = 'memory'\ndevice = 'faults-table'\n{table}");
        let source = Source::new("test", text);
        let document = source.parse().unwrap();
        let ports = document.settings().tables("port").unwrap();
        crate::drivers::plan(ports.into_iter().next().unwrap()).map_err(|error| error.to_string())
    };
    let port = read("[port.faults]\nseed = 9\nrx = { loss = 0.25, distance = 3 }\ntx = { full = 1, full_calls = 7 }\n");
    let plan = format!("{:?}", port.unwrap().plan);
    for expected in ["seed: 9", "loss: 0.25", "distance: 3", "full: 1.0", "full_calls: 7"] {
        assert!(plan.contains(expected), "{expected}: {plan}");
    }
    assert!(!format!("{:?}", read("").unwrap().plan).contains("Faulty"), "no table, no wrapper");
    for (table, expected) in [
        ("rx = { loss = 1.5 }", "expected a number from 0 to 1"),
        ("rx = { full = 0.5 }", "full"),
        ("tx = { distance = 0 }", "distance"),
        ("losses = 1", "losses"),
    ] {
        let error = read(&format!("[port.faults]\n{table}\n")).unwrap_err();
        assert!(error.contains(expected), "{table}: {error}");
    }
}

#[test]
fn a_replayed_file_has_the_same_faults_each_time() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("frames.pcapng");
    let pool = Pool::new("replay", 1024).unwrap();
    let open = |text: String| {
        let source = Source::new("test", format!("[[port]]\nname = 'a'\ndriver = 'pcap'\n{text}"));
        let document = source.parse().unwrap();
        let port = document.settings().tables("port").unwrap().remove(0);
        start(crate::drivers::plan(port).unwrap().plan, &pool)
    };
    let mut writer = open(format!("[port.pcap]\nwrite = '{}'\n", path.display()));
    let mut batch = Batch::new();
    for number in 0..500u32 {
        let mut packet = pool.take().unwrap();
        assert!(packet.extend_from_slice(&[&number.to_be_bytes()[..], &[0x5a; 60]].concat(), &pool));
        batch.push(packet).unwrap();
        writer.tx[0].transmit(&mut batch);
    }
    writer.port.stop(writer.rx, writer.tx).unwrap();
    let faults = "loss = 0.1, duplicate = 0.1, reorder = 0.1, distance = 3";
    let [first, again, other] = [1, 1, 2].map(|seed| {
        let read = format!("[port.pcap]\nread = '{}'\n", path.display());
        let mut reader = open(format!("{read}[port.faults]\nseed = {seed}\nrx = {{ {faults} }}\n"));
        let mut frames = Vec::new();
        for _ in 0..100 {
            reader.rx[0].receive(&mut batch);
            frames.extend(batch.iter().map(|packet| packet.data()[..4].to_vec()));
            batch.clear();
        }
        let stats = reader.rx[0].counters().snapshot();
        assert_eq!(frames.len() as u64, stats.packets + stats.injected_copies);
        assert_eq!(stats.packets + stats.dropped(), 500);
        reader.port.stop(reader.rx, reader.tx).unwrap();
        frames
    });
    assert_eq!(first, again);
    assert_ne!(first, other);
}
