#![allow(unsafe_code, clippy::all)]
use wirepath_pmd::drivers::null::*;
use wirepath_pmd::packet::*;
use wirepath_pmd::port::*;
fn main() {
    let ring: u32 = std::env::args().nth(1).map_or(0, |s| s.parse().unwrap());
    let mode = std::env::args().nth(2).unwrap_or("macswap".into());
    let pool = Pool::new("p", 32768).unwrap();
    let mk = |id| {
        let plan = Options { source: Some(Frames::Untouched { size: 64 }), count: None, ring };
        OpenPort::open(format!("n{id}"), Box::new(plan))
            .unwrap()
            .configure(PortConfig::new(id, pool.clone()))
            .unwrap()
            .start()
            .unwrap()
    };
    let (mut a, mut b) = (mk(0), mk(1));
    let mut batch = Batch::new();
    let start = cpu();
    let mut n = 0usize;
    let t = std::time::Instant::now();
    while t.elapsed().as_secs_f64() < 2.0 {
        for _ in 0..2000 {
            for (rx, tx) in [(&mut a.rx[0], &mut b.tx[0]), (&mut b.rx[0], &mut a.tx[0])] {
                n += rx.receive(&mut batch);
                if mode == "macswap" {
                    for p in batch.iter_mut() {
                        if let Some(h) = p.data_mut().first_chunk_mut::<12>() {
                            let d = u64::from_le_bytes(*h.first_chunk::<8>().unwrap());
                            let s = u64::from_le_bytes(*h[4..].first_chunk::<8>().unwrap()) >> 16;
                            h[..8].copy_from_slice(&(s | d << 48).to_le_bytes());
                            h[8..].copy_from_slice(&((d >> 16) as u32).to_le_bytes());
                        }
                    }
                }
                tx.transmit(&mut batch);
            }
        }
    }
    let c = cpu() - start;
    println!("{mode} ring {ring}: {:.2} cycles/packet", c as f64 / n as f64);
}
fn cpu() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
    ((t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64) as f64 * 2.6) as u64
}
