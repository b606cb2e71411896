"""What people look at: pictures, reports, traces, all made from one plan, saved or not."""
