//! Bursts through in-process ports do not allocate.

use wirepath_packet::PortId;
use wirepath_packet::{Batch, Pool};
use wirepath_pmd::drivers::r#virtual::{memory, pcap};
use wirepath_pmd::port::{OpenPort, PortConfig, PortSpec, StartedPort};
use wirepath_testlab::allocations;

fn start(plan: Box<dyn PortSpec>, pool: &Pool) -> StartedPort {
    OpenPort::open("p", plan)
        .unwrap()
        .configure(PortConfig::new(PortId::new(0), pool.clone()))
        .unwrap()
        .start()
        .unwrap()
}

#[test]
fn a_cable_allocates_nothing_per_burst() {
    let pool = Pool::new("p", 2048).unwrap();
    let (a, b) = memory::cable(memory::Options::default());
    let (mut a, mut b) = (start(a, &pool), start(b, &pool));
    let mut batch = Batch::new();
    let mut moved = 0;
    let mut work = |rounds: usize| {
        for _ in 0..rounds {
            pool.take_batch(32, &mut batch);
            batch.iter_mut().for_each(|packet| assert!(packet.append(100).is_some()));
            a.tx[0].transmit(&mut batch);
            moved += b.rx[0].receive(&mut batch);
            b.tx[0].transmit(&mut batch);
            a.rx[0].receive(&mut batch);
            batch.clear();
        }
    };
    // The first burst connects to the other side.
    work(1);
    assert_eq!(allocations(|| work(1000)), 0);
    assert_eq!(moved, 32 * 1001);
}

#[test]
fn files_are_read_and_written_without_allocating_per_burst() {
    let folder = tempfile::tempdir().unwrap();
    let pool = Pool::new("p", 2048).unwrap();
    // The first packet of a thread allocates its cache.
    drop(pool.take());
    for (format, suffix) in [(pcap::Format::Pcap, "pcap"), (pcap::Format::Pcapng, "pcapng")] {
        let (input, output) = (folder.path().join("in"), folder.path().join("out").with_extension(suffix));
        let file = std::fs::File::create(&input).unwrap();
        let mut writer = pcap::Writer::new(file, format, pcap::Precision::Nano, 2000, "test").unwrap();
        let frame = [7; 1000];
        for _ in 0..3000 {
            writer.write(0, std::iter::once(&frame[..]), frame.len()).unwrap();
        }
        drop(writer);
        let options = pcap::Options { read: Some(input), write: Some(output), format, ..pcap::Options::default() };
        let mut port = start(Box::new(options), &pool);
        let mut batch = Batch::new();
        let mut moved = 0;
        let count = allocations(|| {
            while port.rx[0].receive(&mut batch) > 0 {
                moved += port.tx[0].transmit(&mut batch);
            }
        });
        assert_eq!((count, moved), (0, 3000));
    }
}
