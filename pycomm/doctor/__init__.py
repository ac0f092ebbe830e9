"""Checks of a cluster before a job starts: why it would not start, and which host is slow.

Each module either gathers facts or judges them. Modules that judge are pure functions over facts,
so that tests need no network:

    facts     what is known of a host          local       judges it, and compares hosts
    system    reads it from this host          rules       reads nftables
    probe     asks another host's doctor       reach       judges who reaches whom
    flow      bytes over one connection        rate        judges who is slow
    sync      one all_reduce of the engine     firewall    lines that open or close ports
    splits    bytes of DDP, FSDP and others

    join      finds the store                  board       what hosts exchange by it
    meeting   which ranks came                 attendance  who did not come, or ended
    run       the stages, in order             bounded     calls that may block for long
    report    the result                       screen      the result for a terminal

    preflight stage 0 alone, in a job itself
"""
