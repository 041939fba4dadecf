//! Tests of the driver as a port.

use std::time::{Duration, Instant};
use wirepath_packet::PortId;

use wirepath_testlab::eventually;

use super::*;
use crate::port::{OpenPort, StartedPort};
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Packet, Pool};

fn config(pool: &Pool) -> PortConfig {
    PortConfig { mtu: 9202, ..PortConfig::new(PortId::new(3), pool.clone()) }
}

fn start(options: Options, pool: &Pool) -> StartedPort {
    OpenPort::open("p", Box::new(options)).unwrap().configure(config(pool)).unwrap().start().unwrap()
}

/// Polls until no frame arrives `misses` times.
fn poll(port: &mut StartedPort, misses: usize) -> Vec<Vec<u8>> {
    let (mut all, mut batch, mut missed) = (Vec::new(), Batch::new(), 0);
    while missed < misses {
        if port.rx[0].receive(&mut batch) == 0 {
            missed += 1;
        }
        all.extend(batch.iter().map(|packet| packet.segments().flatten().copied().collect()));
        assert!(batch.iter().all(|packet| packet.in_port() == Some(PortId::new(3))));
        batch.clear();
    }
    all
}

fn packet(pool: &Pool, bytes: &[u8]) -> Packet {
    let mut packet = pool.take().unwrap();
    assert!(packet.extend_from_slice(bytes, pool));
    packet
}

fn transmit(port: &mut StartedPort, pool: &Pool, frames: &[Vec<u8>]) {
    for frames in frames.chunks(64) {
        let mut batch: Batch = frames.iter().map(|frame| packet(pool, frame)).collect();
        assert_eq!(port.tx[0].transmit(&mut batch), frames.len());
    }
}

#[test]
fn a_file_goes_through_and_ends() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.pcap"), folder.path().join("out.pcapng"));
    std::fs::write(&input, file(&frames(), Format::Pcap, Precision::Micro)).unwrap();
    let pool = Pool::new("p", 256).unwrap();
    let options = Options { read: Some(input), write: Some(output.clone()), passes: Some(3), ..Options::default() };
    let mut port = start(options, &pool);
    let mut batch = Batch::new();
    assert_eq!(port.rx[0].receive(&mut batch), 27, "three passes of nine frames");
    assert_eq!(batch.as_slice()[0].timestamp(), Some(TIME / 1000 * 1000));
    assert_eq!(port.port.events(), [PortEvent::Finished]);
    assert_eq!(port.tx[0].transmit(&mut batch), 27);
    assert!(poll(&mut port, 3).is_empty() && port.port.events().is_empty(), "reported once");
    let extra = port.port.extra_statistics();
    assert!(extra.contains(&("file_passes", 3)), "{extra:?}");
    let stopped = port.port.stop(port.rx, port.tx).unwrap();
    let (got, error) = read(&std::fs::read(&output).unwrap());
    assert!(error.is_none());
    assert!(got.iter().map(|r| &r.1).eq([frames(), frames(), frames()].concat().iter()));
    // A restarted port continues where it stopped.
    let mut port = stopped.start().unwrap();
    assert!(poll(&mut port, 2).is_empty());
    transmit(&mut port, &pool, &frames());
    drop(port.port.stop(port.rx, port.tx).unwrap());
    assert_eq!(read(&std::fs::read(&output).unwrap()).0.len(), 36);
    assert_eq!(pool.available(), pool.capacity());
}

#[test]
fn reading_goes_on_after_a_stop() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.pcap");
    let many: Vec<Vec<u8>> = (0..200u8).map(|n| vec![n; 60]).collect();
    std::fs::write(&input, file(&many, Format::Pcapng, Precision::Nano)).unwrap();
    let pool = Pool::new("p", 512).unwrap();
    let mut port = start(Options { read: Some(input), ..Options::default() }, &pool);
    let mut seen = Vec::new();
    loop {
        let mut batch = Batch::new();
        if port.rx[0].receive(&mut batch) == 0 {
            break;
        }
        seen.extend(batch.iter().map(|packet| packet.data()[0]));
        drop(batch);
        let stopped = port.port.stop(port.rx, port.tx).unwrap();
        assert_eq!(pool.available(), pool.capacity());
        port = stopped.start().unwrap();
    }
    assert!(seen.into_iter().eq(0..200));
}

#[test]
fn an_empty_pool_loses_no_frame() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.pcap");
    std::fs::write(&input, file(&frames(), Format::Pcap, Precision::Nano)).unwrap();
    // The pool has four buffers; the jumbo frame needs five.
    let pool = Pool::new("p", 4).unwrap();
    let mut port = start(Options { read: Some(input.clone()), ..Options::default() }, &pool);
    let got = poll(&mut port, 5);
    assert_eq!(got, frames()[..7], "frames of up to four buffers");
    assert!(port.port.events().is_empty(), "not finished: two frames wait for buffers");
    assert_eq!(pool.available(), pool.capacity());
    let pool = Pool::new("p", 5).unwrap();
    let mut port = start(Options { read: Some(input), ..Options::default() }, &pool);
    assert_eq!(poll(&mut port, 5), frames());
}

#[test]
fn frames_that_no_port_takes_are_dropped_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.pcap"), folder.path().join("out.pcap"));
    let odd = [vec![1; 13], vec![2; 9225], vec![3; 60], vec![]];
    std::fs::write(&input, file(&odd, Format::Pcapng, Precision::Nano)).unwrap();
    let pool = Pool::new("p", 64).unwrap();
    let options = Options { read: Some(input), write: Some(output), ..Options::default() };
    let mut port = start(options, &pool);
    assert_eq!(poll(&mut port, 2), [vec![3; 60]]);
    let drops = vec![(DropReason::TooLong, 1), (DropReason::TooShort, 2)];
    assert_eq!(port.port.rx_statistics()[0].drops, drops);
    transmit(&mut port, &pool, &odd);
    let sent = &port.port.tx_statistics()[0];
    assert_eq!((sent.packets, sent.bytes, &sent.drops), (1, 60, &drops));
}

#[test]
fn unreadable_files_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let pool = Pool::new("p", 64).unwrap();
    let input = folder.path().join("in.pcap");
    let whole = file(&frames(), Format::Pcap, Precision::Nano);
    std::fs::write(&input, &whole[..whole.len() - 1]).unwrap();
    let mut port = start(Options { read: Some(input.clone()), ..Options::default() }, &pool);
    assert_eq!(poll(&mut port, 2), frames()[..8]);
    assert_eq!(port.port.events(), [PortEvent::Finished], "the writer was killed: all there is was received");
    assert!(port.port.extra_statistics().contains(&("file_cut_off", 1)));

    let mut broken = file(&frames()[..2], Format::Pcap, Precision::Nano);
    broken.extend([0xff; 16]);
    std::fs::write(&input, broken).unwrap();
    let mut port = start(Options { read: Some(input.clone()), ..Options::default() }, &pool);
    assert_eq!(poll(&mut port, 2), frames()[..2]);
    let events = port.port.events();
    let [PortEvent::Lost(why)] = &events[..] else { panic!("{events:?}") };
    assert_eq!(*why, format!("pcap: {}: at byte 130: a frame of 4294967295 bytes; 262144 at most", input.display()));
    assert_eq!(port.port.link(), Link::DOWN);
}

#[test]
fn a_file_without_frames_ends_even_in_an_endless_loop() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.pcap");
    std::fs::write(&input, file(&[], Format::Pcap, Precision::Nano)).unwrap();
    let pool = Pool::new("p", 4).unwrap();
    let mut port = start(Options { read: Some(input), passes: None, ..Options::default() }, &pool);
    assert!(poll(&mut port, 1).is_empty());
    assert_eq!(port.port.events(), [PortEvent::Finished]);
}

#[test]
fn original_timing_is_not_faster_than_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.pcap");
    let mut bytes = Vec::new();
    let mut writer = Writer::new(&mut bytes, Format::Pcap, Precision::Nano, 2000, "test").unwrap();
    // Intervals of 30 ms, a step back, and 10 ms: 40 ms in total, 20 ms at double speed.
    for (n, milliseconds) in [0, 30, 5, 15].into_iter().enumerate() {
        writer.write(TIME + milliseconds * 1_000_000, std::iter::once(&[n as u8; 60][..]), 60).unwrap();
    }
    drop(writer);
    std::fs::write(&input, bytes).unwrap();
    let pool = Pool::new("p", 64).unwrap();
    let options = Options { read: Some(input), timing: Timing::Original(2.0), ..Options::default() };
    let mut port = start(options, &pool);
    let begin = Instant::now();
    let mut got = Vec::new();
    while port.port.events().is_empty() {
        got.extend(poll(&mut port, 1).iter().map(|frame| frame[0]));
    }
    assert_eq!(got, [0, 1, 2, 3]);
    assert!(begin.elapsed() >= Duration::from_millis(20));
    assert!(port.port.extra_statistics().contains(&("timestamps_going_back", 1)));
}

#[cfg(feature = "pcap")]
#[test]
fn settings_are_checked() {
    use wirepath_settings::Source;

    let plan = |text: &str| {
        let source = Source::new("c.toml", format!("[[port]]\nname = 'x'\ndriver = 'pcap'\n{text}"));
        let document = source.parse().unwrap();
        let port = document.settings().tables("port").unwrap().remove(0);
        crate::drivers::plan(port).map(|settings| format!("{:?}", settings.plan)).map_err(|error| error.to_string())
    };
    for (text, want) in [
        ("", "read: missing, expected a file to read, or one to write (write)"),
        ("device = 'a'\n[port.pcap]\nread = 'b'", "the port's device names a file to read already"),
        ("[port.pcap]\nread = 'b.pcap'\nwrite = 'b.pcap'", "write: the file that is read would be overwritten"),
        ("[port.pcap]\nwrite = 'b.txt'", "cannot tell the format by the suffix; expected .pcap or .pcapng, or format"),
        ("[port.pcap]\nread = 'b'\nspeed = 2", "speed: has a meaning only with timing = \"original\""),
        (
            "[port.pcap]\nread = 'b'\ntiming = 'original'\nspeed = 0",
            "speed: found 0, expected a number from 0.000001 to 1000000",
        ),
        ("[port.pcap]\nread = 'b'\ntiming = 'orginal'", "did you mean \"original\"?"),
        ("[port.pcap]\nread = 'b'\nsped = 1", "c.toml:6:1: port[0].pcap.sped: unknown key; did you mean \"speed\"?"),
        ("[port.pcap]\nread = 'b'\nsnap = 1", "expected an integer from 64 to 262144"),
    ] {
        let error = plan(text).unwrap_err();
        assert!(error.contains(want), "got: {error}\nwant: {want}");
    }
    let full = "[port.pcap]\nread = 'a'\nwrite = 'b'\nformat = 'pcap'\ntiming = 'original'\nspeed = 0.5\nloop = 0\n\
                precision = 'micro'\nsnap = 96";
    let plan = plan(full).unwrap();
    assert!(
        plan.contains("Original(0.5), passes: None") && plan.contains("Pcap, precision: Micro, snap: 96"),
        "{plan}"
    );
}

#[test]
fn errors_on_open_name_the_file() {
    let open = |path: &Path| {
        let options = Options { read: Some(path.to_owned()), ..Options::default() };
        OpenPort::open("p", Box::new(options)).unwrap_err().to_string()
    };
    let folder = tempfile::tempdir().unwrap();
    assert!(open(&folder.path().join("none")).contains("no device '"));
    assert!(open(folder.path()).contains("not a regular file"));
    std::fs::write(folder.path().join("text"), "hello, world").unwrap();
    assert!(open(&folder.path().join("text")).contains("neither pcap nor pcapng"));
}

#[test]
fn without_an_output_file_packets_are_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.pcap");
    std::fs::write(&input, file(&frames(), Format::Pcap, Precision::Nano)).unwrap();
    let pool = Pool::new("p", 64).unwrap();
    let mut port = start(Options { read: Some(input), ..Options::default() }, &pool);
    transmit(&mut port, &pool, &frames());
    assert_eq!(port.port.tx_statistics()[0].drops, [(DropReason::NoDestination, 9)]);
    assert!(port.port.capabilities().notes[0].contains("dropped and counted"));
}

#[test]
fn a_full_disk_is_said() {
    let full = Path::new("/dev/full");
    let pool = Pool::new("p", 64).unwrap();
    let options = Options { write: Some(full.to_owned()), ..Options::default() };
    let error = OpenPort::open("p", Box::new(options)).unwrap().configure(config(&pool)).unwrap().start().unwrap_err();
    assert!(error.to_string().contains("No space left on device"), "{error}");
}

const FILE: &str = "WIREPATH_PCAP_KILLED";

/// Child process that [`a_killed_writer_leaves_a_readable_file`] kills.
#[test]
fn child() {
    let Ok(path) = std::env::var(FILE) else { return };
    let pool = Pool::new("p", 256).unwrap();
    let mut port = start(Options { write: Some(path.into()), ..Options::default() }, &pool);
    loop {
        transmit(&mut port, &pool, &frames());
        port.tx[0].reclaim();
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_killed_writer_leaves_a_readable_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.pcapng");
    let variable = format!("{FILE}={}", path.display());
    let program = std::env::current_exe().unwrap();
    let name = format!("{}::child", module_path!().split_once("::").unwrap().1);
    let child =
        wirepath_testlab::spawn(&["env", &variable, program.to_str().unwrap(), "--exact", &name, "--nocapture"]);
    let flushed = eventually(Duration::from_secs(30), || {
        std::fs::read(&path).is_ok_and(|bytes| !bytes.is_empty() && read(&bytes).0.len() > frames().len())
    });
    let outcome = child.kill();
    assert!(flushed, "{}{}", outcome.stdout, outcome.stderr);
    let (got, error) = read(&std::fs::read(&path).unwrap());
    assert!(matches!(error, None | Some(FileError::Truncated { .. })), "{error:?}");
    assert!(got.iter().map(|record| &record.1).zip(frames().iter().cycle()).all(|(got, want)| got == want));
}

/// Creates a FIFO.
fn fifo(folder: &Path) -> PathBuf {
    let path = folder.join("fifo.pcapng");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    path
}

/// Opens and starts a port in another thread. `None` if this blocks.
fn try_start(options: Options) -> Option<Result<(), String>> {
    let (done, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let pool = Pool::new("p", 64).unwrap();
        let started = OpenPort::open("p", Box::new(options))
            .and_then(|port| port.configure(config(&pool)))
            .and_then(crate::port::ConfiguredPort::start);
        let _ = done.send(started.map(drop).map_err(|error| error.to_string()));
    });
    wait.recv_timeout(Duration::from_secs(10)).ok()
}

#[test]
fn a_fifo_without_a_peer_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = fifo(folder.path());
    let refused = |options| try_start(options).expect("the start does not wait").unwrap_err();
    let error = refused(Options { write: Some(path.clone()), ..Options::default() });
    assert!(error.contains("nobody reads this FIFO"), "{error}");
    let error = refused(Options { read: Some(path), ..Options::default() });
    assert!(error.contains("not a regular file"), "{error}");
}

/// Opens the FIFO for reading. Its writer may come later.
fn open_reader(path: &Path) -> File {
    File::options().read(true).custom_flags(O_NONBLOCK).open(path).unwrap()
}

#[test]
fn a_fifo_that_is_never_read_does_not_block() {
    let folder = tempfile::tempdir().unwrap();
    let path = fifo(folder.path());
    let reader = open_reader(&path);
    let pool = Pool::new("p", 256).unwrap();
    let mut port = start(Options { write: Some(path.clone()), ..Options::default() }, &pool);
    let (mut left, mut offered) = (0, 0);
    // More than the FIFO and the buffer of the writer hold.
    for _ in 0..20 {
        let mut batch: Batch = (0..64).map(|n| packet(&pool, &[n; 1500])).collect();
        port.tx[0].transmit(&mut batch);
        (left, offered) = (left + batch.len() as u64, offered + 64);
    }
    let sent = port.port.tx_statistics()[0].packets;
    assert!(left > 0 && sent + left == offered, "{sent} taken, {left} left of {offered}");
    assert!(port.port.events().is_empty(), "a slow reader is no loss");
    let counters = Arc::clone(port.tx[0].counters());
    let error = port.port.stop(port.rx, port.tx).unwrap_err();
    assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    // What the FIFO holds has left; the rest is dropped and no longer counted as sent.
    let dropped = counters.drops.get(DropReason::Stopping);
    assert!(dropped > 0 && counters.packets.get() + dropped == sent, "{:?}", counters.snapshot());
    assert_eq!(counters.bytes.get(), counters.packets.get() * 1500);
    let mut content = Vec::new();
    std::io::Read::read_to_end(&mut &reader, &mut content).unwrap();
    assert_eq!(read(&content).0.len() as u64, counters.packets.get());
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn a_slow_reader_of_a_fifo_gets_all_that_was_taken() {
    for format in [Format::Pcap, Format::Pcapng] {
        let folder = tempfile::tempdir().unwrap();
        let path = fifo(folder.path());
        let reader = open_reader(&path);
        let reading = std::thread::spawn(move || {
            let (mut content, mut part, mut started) = (Vec::new(), vec![0; 7777], false);
            loop {
                match std::io::Read::read(&mut &reader, &mut part) {
                    Ok(0) if started => return content,
                    Ok(n) => {
                        content.extend_from_slice(&part[..n]);
                        started |= n > 0;
                    }
                    Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
                }
                std::thread::sleep(Duration::from_micros(100));
            }
        });
        let pool = Pool::new("p", 256).unwrap();
        let mut port = start(Options { write: Some(path), format, ..Options::default() }, &pool);
        let mut taken = Vec::new();
        for n in 0..5000u32 {
            let frame = [&n.to_be_bytes()[..], &vec![7; 60 + n as usize % 1400]].concat();
            let mut batch: Batch = [packet(&pool, &frame)].into_iter().collect();
            if port.tx[0].transmit(&mut batch) == 1 {
                taken.push(frame);
            }
            if n % 50 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let counters = Arc::clone(port.tx[0].counters());
        let _ = port.port.stop(port.rx, port.tx);
        let (got, error) = read(&reading.join().unwrap());
        taken.truncate(counters.packets.get() as usize);
        assert!(taken.len() > 100 && got.iter().map(|record| &record.1).eq(&taken), "{format:?}: {}", got.len());
        assert!(error.is_none() || counters.drops.get(DropReason::Stopping) > 0, "{error:?}");
    }
}

#[test]
fn a_fifo_whose_reader_ends_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let path = fifo(folder.path());
    let reader = open_reader(&path);
    let pool = Pool::new("p", 256).unwrap();
    let mut port = start(Options { write: Some(path), ..Options::default() }, &pool);
    drop(reader);
    let mut offered = 0;
    while port.port.events().is_empty() {
        let mut batch: Batch = (0..64).map(|_| packet(&pool, &[1; 1500])).collect();
        offered += 64;
        while !batch.is_empty() {
            port.tx[0].transmit(&mut batch);
        }
        assert!(offered < 64_000, "the loss is reported");
    }
    let counters = port.port.tx_statistics().remove(0);
    assert_eq!((counters.packets, counters.dropped()), (0, offered), "{counters:?}");
}
