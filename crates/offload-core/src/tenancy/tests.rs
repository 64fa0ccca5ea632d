//! Who stays, by cases and against a naive model.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn tenant(name: &str, own: u32, ring: u32, most: u32, company: &[&str]) -> Tenant {
    let company = if company == ["*"] {
        Company::Everyone
    } else {
        Company::Of(company.iter().map(|&name| name.into()).collect())
    };
    Tenant { name: name.into(), own, ring, most, allowed: most, company }
}

fn run(tenancy: &mut Tenancy, id: TenantId, ring: &mut u32) -> Vec<TenantId> {
    let switch = tenancy.switch(id, *ring, &[], false).unwrap();
    switch.leave.iter().for_each(|&other| tenancy.left(other));
    tenancy.came(id);
    *ring = switch.ring;
    switch.leave
}

#[test]
fn company_is_directional() {
    let (mut tenancy, mut ring) = (Tenancy::new(100), 0);
    let a = tenancy.join(tenant("a", 10, 2, 20, &[]));
    let b = tenancy.join(tenant("b", 10, 2, 20, &["a"]));
    assert_eq!(run(&mut tenancy, a, &mut ring), []);
    assert_eq!(run(&mut tenancy, b, &mut ring), [], "b accepts a");
    assert_eq!(run(&mut tenancy, a, &mut ring), [b], "a does not accept b");
}

#[test]
fn a_model_for_everyone_stays_and_makes_nobody_leave() {
    let (mut tenancy, mut ring) = (Tenancy::new(100), 0);
    let vae = tenancy.join(tenant("vae", 5, 0, 5, &["*"]));
    let a = tenancy.join(tenant("a", 10, 2, 20, &[]));
    let b = tenancy.join(tenant("b", 10, 2, 20, &[]));
    assert_eq!(run(&mut tenancy, vae, &mut ring), []);
    assert_eq!(run(&mut tenancy, a, &mut ring), []);
    assert_eq!(run(&mut tenancy, vae, &mut ring), []);
    assert_eq!(run(&mut tenancy, b, &mut ring), [a]);
    assert_eq!(tenancy.here().collect::<Vec<_>>(), [vae, b]);
}

#[test]
fn what_ran_longest_ago_leaves_where_all_would_not_fit() {
    let (mut tenancy, mut ring) = (Tenancy::new(50), 0);
    let names = ["a", "b", "c"];
    let [a, b, c] = names.map(|name| tenancy.join(tenant(name, 10, 5, 20, &names)));
    assert_eq!(run(&mut tenancy, a, &mut ring), []);
    assert_eq!(run(&mut tenancy, b, &mut ring), []);
    assert_eq!(run(&mut tenancy, a, &mut ring), [], "used in turn, both stay");
    assert_eq!(run(&mut tenancy, c, &mut ring), [b]);
    let crowded = tenancy.switch(b, ring, &[a, c], false).unwrap_err();
    assert_eq!((crowded.needed, crowded.taken, crowded.limit), (20, 40, 50));
}

#[test]
fn the_ring_is_kept_for_those_that_come_back_while_nobody_lacks_its_pages() {
    let (mut tenancy, mut ring) = (Tenancy::new(100), 0);
    let large = tenancy.join(tenant("large", 30, 10, 40, &[]));
    let small = tenancy.join(tenant("small", 8, 0, 20, &[]));
    let full = tenancy.join(tenant("full", 38, 2, 40, &[]));
    run(&mut tenancy, large, &mut ring);
    assert_eq!(ring, 10);
    run(&mut tenancy, small, &mut ring);
    assert_eq!(ring, 10, "8 of its own and 10 are within its 20");
    run(&mut tenancy, full, &mut ring);
    assert_eq!(ring, 2);
}

#[test]
fn a_roomy_device_keeps_the_ring_within_the_budgets_of_those_that_are_here() {
    let (mut tenancy, mut ring) = (Tenancy::new(100), 0);
    let large = tenancy.join(tenant("large", 30, 10, 40, &[]));
    let small = tenancy.join(Tenant { allowed: 40, ..tenant("small", 8, 0, 8, &[]) });
    let tight = tenancy.join(Tenant { allowed: 12, ..tenant("tight", 8, 0, 8, &[]) });
    run(&mut tenancy, large, &mut ring);
    let switch = |id, roomy| tenancy.switch(id, 10, &[], roomy).unwrap();
    let of = |switch: Switch| (switch.ring, switch.most);
    assert_eq!(of(switch(small, false)), (0, 8));
    assert_eq!(of(switch(small, true)), (10, 18));
    assert_eq!(of(switch(tight, true)), (4, 12));
    let mut narrow = Tenancy::new(15);
    let small = narrow.join(Tenant { allowed: 40, ..tenant("small", 8, 0, 8, &[]) });
    assert_eq!(of(narrow.switch(small, 10, &[], true).unwrap()), (7, 15), "of the device's limit");
}

#[test]
fn room_for_more_is_made_by_those_that_ran_longest_ago() {
    let (mut tenancy, mut ring) = (Tenancy::new(100), 0);
    let names = ["a", "b", "c", "vae"];
    let [a, b, c] = ["a", "b", "c"].map(|name| tenancy.join(tenant(name, 10, 5, 20, &names)));
    let vae = tenancy.join(tenant("vae", 5, 0, 10, &["*"]));
    for id in [vae, a, b, c] {
        assert_eq!(run(&mut tenancy, id, &mut ring), []);
    }
    assert_eq!(tenancy.make_room(c, 50, &[]).unwrap(), [], "50 + 20 + 20 + 10");
    assert_eq!(tenancy.make_room(c, 51, &[]).unwrap(), [a]);
    assert_eq!(tenancy.make_room(c, 51, &[a]).unwrap(), [b]);
    assert_eq!(tenancy.make_room(c, 90, &[]).unwrap(), [a, b]);
    let crowded = tenancy.make_room(c, 91, &[]).unwrap_err();
    assert_eq!((crowded.needed, crowded.taken, &crowded.staying[..]), (91, 10, &["vae".to_owned()][..]));
    assert_eq!(tenancy.make_room(b, 51, &[]).unwrap(), [a]);
    assert_eq!(tenancy.make_room(b, 71, &[]).unwrap(), [b], "c ran since");
    assert_eq!(tenancy.make_room(vae, 41, &[]).unwrap(), [a], "it never leaves itself");
    tenancy.left(a);
    assert_eq!(tenancy.make_room(a, 100, &[b]).unwrap(), [], "it comes when it can");
    assert!(tenancy.make_room(a, 101, &[]).is_err());
}

#[derive(Debug, Clone)]
enum Act {
    Run(usize),
    Part(usize),
    Replan(usize, u32),
    Rebudget(usize, u32),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => (0..6_usize).prop_map(Act::Run),
        1 => (0..6_usize).prop_map(Act::Part),
        2 => (0..6_usize, 0..20_u32).prop_map(|(id, ring)| Act::Replan(id, ring)),
        2 => (0..6_usize, 1..60_u32).prop_map(|(id, most)| Act::Rebudget(id, most)),
    ]
}

proptest! {
    /// The naive model keeps sets of names, and checks what every decision must respect.
    #[test]
    fn no_decision_holds_more_than_the_limit_or_sends_away_what_may_stay(
        models in prop::collection::vec((1..20_u32, 0..8_u32, 0..6_u32, prop::collection::vec(0..6_usize, 0..4), 0..8_u8), 6),
        limit in 20..90_u32,
        acts in prop::collection::vec(act(), 1..40),
    ) {
        let mut tenancy = Tenancy::new(limit);
        let mut known: Vec<Option<Tenant>> = Vec::new();
        for (number, (own, ring, more, company, kind)) in models.into_iter().enumerate() {
            let names: Vec<String> = company.iter().map(usize::to_string).collect();
            let names: Vec<&str> = if kind == 0 { vec!["*"] } else { names.iter().map(String::as_str).collect() };
            let mut tenant = tenant(&number.to_string(), own, ring, own + ring + more, &names);
            tenant.allowed += 3 * more;
            prop_assert_eq!(tenancy.join(tenant.clone()).0 as usize, number);
            known.push(Some(tenant));
        }
        let mut here: Vec<usize> = Vec::new();
        let mut ring = 0;
        for act in acts {
            match act {
                Act::Part(id) => {
                    tenancy.part(TenantId(id as u32));
                    known[id] = None;
                    here.retain(|other| *other != id);
                }
                Act::Replan(id, wanted) => {
                    let Some(tenant) = &mut known[id] else { continue };
                    tenant.ring = wanted.min(tenant.most);
                    tenant.own = tenant.most - tenant.ring;
                    tenancy.replan(TenantId(id as u32), tenant.own, tenant.ring);
                    ring = tenancy.ring(ring);
                }
                Act::Rebudget(id, wanted) => {
                    let Some(tenant) = known[id].clone() else { continue };
                    let most = |ids: &[usize]| ids.iter().map(|&other| known[other].as_ref().unwrap().most).sum::<u32>();
                    let others: Vec<usize> = here.iter().copied().filter(|other| *other != id).collect();
                    let is_here = here.contains(&id);
                    let Ok(leave) = tenancy.make_room(TenantId(id as u32), wanted, &[]) else {
                        let never = |other: &usize| known[*other].as_ref().unwrap().company == Company::Everyone;
                        let stuck: Vec<usize> = others.into_iter().filter(|other| is_here && never(other)).collect();
                        prop_assert!(most(&stuck) + wanted > limit);
                        continue;
                    };
                    let leave: Vec<usize> = leave.into_iter().map(|id| id.0 as usize).collect();
                    prop_assert!(leave.is_empty() || is_here && most(&others) + wanted > limit);
                    here.retain(|other| !leave.contains(other));
                    for &other in &leave {
                        tenancy.left(TenantId(other as u32));
                    }
                    if here.contains(&id) {
                        let others: Vec<usize> = here.iter().copied().filter(|other| *other != id).collect();
                        prop_assert!(most(&others) + wanted <= limit);
                    }
                    let (own, parts) = (wanted - tenant.ring.min(wanted), tenant.ring.min(wanted));
                    tenancy.rebudget(TenantId(id as u32), own, parts, wanted);
                    let allowed = if wanted == tenant.most { tenant.allowed } else { wanted };
                    known[id] = Some(Tenant { own, ring: parts, most: wanted, allowed, ..tenant });
                    prop_assert!(tenancy.most() <= limit);
                    ring = tenancy.ring(ring);
                }
                Act::Run(id) => {
                    let Some(runs) = known[id].clone() else { continue };
                    let accepts = |other: usize| {
                        let other = known[other].as_ref().unwrap();
                        other.company == Company::Everyone || match &runs.company {
                            Company::Everyone => true,
                            Company::Of(names) => names.contains(&other.name),
                        }
                    };
                    let never = |other: usize| known[other].as_ref().unwrap().company == Company::Everyone;
                    let most = |ids: &[usize]| ids.iter().map(|&other| known[other].as_ref().unwrap().most).sum::<u32>();
                    let others: Vec<usize> = here.iter().copied().filter(|other| *other != id).collect();
                    let roomy = ring % 2 == 0;
                    let Ok(switch) = tenancy.switch(TenantId(id as u32), ring, &[], roomy) else {
                        let stuck: Vec<usize> = others.iter().copied().filter(|other| never(*other)).collect();
                        prop_assert!(most(&stuck) + runs.most > limit);
                        continue;
                    };
                    let leave: Vec<usize> = switch.leave.iter().map(|id| id.0 as usize).collect();
                    let stay: Vec<usize> = others.iter().copied().filter(|other| !leave.contains(other)).collect();
                    prop_assert!(leave.iter().all(|other| others.contains(other)));
                    prop_assert!(stay.iter().all(|&other| accepts(other)));
                    prop_assert!(!leave.iter().any(|&other| never(other)));
                    // Whoever was accepted and leaves, with all that stay, would not have fitted.
                    for &other in leave.iter().filter(|other| accepts(**other)) {
                        prop_assert!(most(&stay) + most(&[other]) + runs.most > limit);
                    }
                    let mut now = stay;
                    now.push(id);
                    let allowed: u32 = now.iter().map(|&other| known[other].as_ref().unwrap().allowed).sum();
                    prop_assert!(switch.most <= limit && switch.most >= most(&now));
                    prop_assert!(switch.most == most(&now) || roomy && switch.most <= allowed);
                    let own: u32 = now.iter().map(|&other| known[other].as_ref().unwrap().own).sum();
                    let needed = now.iter().map(|&other| known[other].as_ref().unwrap().ring).max().unwrap();
                    prop_assert!(switch.ring >= needed && own + switch.ring <= switch.most);
                    for &other in &leave {
                        tenancy.left(TenantId(other as u32));
                    }
                    tenancy.came(TenantId(id as u32));
                    here = now;
                    ring = switch.ring;
                }
            }
            let mut listed: Vec<usize> = tenancy.here().map(|id| id.0 as usize).collect();
            listed.sort_unstable();
            here.sort_unstable();
            prop_assert_eq!(&listed, &here);
        }
    }
}
